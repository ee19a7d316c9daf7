package client

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/fence"
)

// recorder sees to it that the token is recorded, for programs that know
// nothing of it. It sends what it is given, and only where the fence answers
// that the record is missing does it put the token into the body, or on the
// object first where the body cannot carry it. So whatever no lease guards is
// sent as it is, once.
type recorder struct {
	// next presents the token by header, where that is granted.
	next   http.RoundTripper
	holder Holder
	// prefix stands before "/api" and "/apis" on this server.
	prefix string
}

// carriers are the content types of bodies that take the record in. A JSON
// patch could, but its outcome depends on the object. An apply could for the
// price of owning the record: the next one without it would take it off.
var carriers = []string{"application/json", "application/yaml", string(types.MergePatchType), string(types.StrategicMergePatchType)}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	if !writes(req) || req.Header.Get("Upgrade") != "" {
		return r.next.RoundTrip(req)
	}
	body, err := readBody(req)
	if err != nil {
		return nil, err
	}
	resp, err := r.send(req, body)
	if err != nil {
		return nil, err
	}
	missing, err := asksForRecord(resp)
	if err != nil || !missing {
		return resp, err
	}
	token, err := r.holder.Present()
	if err != nil {
		return nil, err
	}
	at, ok := r.locate(req)
	if !ok {
		return resp, nil
	}
	kind := contentType(req)
	main := at.subresource == "" && req.Method != http.MethodDelete
	carries := main && slices.Contains(carriers, kind)
	apply := main && kind == string(types.ApplyPatchType)
	switch {
	case carries:
		return r.resend(resp, req, body, token)
	case req.URL.Query().Has("dryRun") && !apply:
		return resp, nil // neither the body nor an object can hold it
	case at.name == "" && req.Method == http.MethodDelete:
		if refused, err := r.recordAll(req, at, token); err != nil || refused != nil {
			return refused, err
		}
		_ = resp.Body.Close()
		return r.send(req, body)
	case at.name == "":
		return resp, nil
	case apply && req.URL.Query().Has("dryRun"):
		return r.resend(resp, req, body, token)
	}
	recorded, err := r.record(req, at, types.MergePatchType, recordOf(token))
	switch {
	case err != nil:
		return nil, err
	case recorded.StatusCode == http.StatusNotFound && apply:
		_ = recorded.Body.Close()
		created, err := r.resend(resp, req, body, token)
		if err == nil && created.StatusCode < http.StatusBadRequest {
			err = r.share(req, at, body, token)
		}
		return created, err
	case recorded.StatusCode >= http.StatusBadRequest:
		_ = resp.Body.Close()
		return recorded, nil
	}
	_ = recorded.Body.Close()
	_ = resp.Body.Close()
	return r.send(req, body)
}

// recordAll records the token on all guarded objects that a deletion of a
// collection names, and gives the answer that stopped it, if one did.
func (r *recorder) recordAll(req *http.Request, at location, token fence.Token) (*http.Response, error) {
	found, refused, err := r.list(req)
	if err != nil || refused != nil {
		return refused, err
	}
	for _, object := range found {
		if object.Labels[fence.LabelLease] == "" || object.Annotations[fence.AnnotationToken] == token.String() {
			continue
		}
		one := at
		one.object += "/" + object.Name
		resp, err := r.record(req, one, types.MergePatchType, recordOf(token))
		if err != nil || resp.StatusCode >= http.StatusBadRequest && resp.StatusCode != http.StatusNotFound {
			return resp, err
		}
		_ = resp.Body.Close()
	}
	return nil, nil
}

// list reads the metadata of all objects that a deletion of a collection
// names, or gives the answer that stopped it.
func (r *recorder) list(req *http.Request) ([]metav1.PartialObjectMetadata, *http.Response, error) {
	var found metav1.PartialObjectMetadataList
	refused, err := r.read(req, "PartialObjectMetadataList", &found)
	return found.Items, refused, err
}

// read reads metadata from where req goes, or gives the answer that stopped it.
func (r *recorder) read(req *http.Request, kind string, into any) (*http.Response, error) {
	get := req.Clone(req.Context())
	get.Method, get.Body, get.ContentLength = http.MethodGet, nil, 0
	get.Header.Set("Accept", "application/json;as="+kind+";g=meta.k8s.io;v=v1")
	resp, err := r.send(get, nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	err = json.NewDecoder(resp.Body).Decode(into)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, fmt.Errorf("read what %s %s writes: %w", req.Method, req.URL.Path, err)
	}
	return nil, nil
}

// share lets another manager own the record too: the next apply, without it,
// would take it off otherwise.
func (r *recorder) share(req *http.Request, at location, body []byte, token fence.Token) error {
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := yaml.Unmarshal(body, &head); err != nil {
		return err
	}
	record := recordOf(token)
	record["apiVersion"], record["kind"] = head.APIVersion, head.Kind
	resp, err := r.record(req, at, types.ApplyPatchType, record)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// recordOf is the body that records a token.
func recordOf(token fence.Token) map[string]any {
	return map[string]any{"metadata": map[string]any{"annotations": map[string]any{fence.AnnotationToken: token.String()}}}
}

// record writes the record alone.
func (r *recorder) record(req *http.Request, at location, kind types.PatchType, record map[string]any) (*http.Response, error) {
	body, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	// The clone keeps what the transports around this one added, such as the
	// credentials.
	out := req.Clone(req.Context())
	out.Method = http.MethodPatch
	out.URL.Path, out.URL.RawPath = r.prefix+at.object, ""
	out.URL.RawQuery = url.Values{"fieldManager": {fieldManager}}.Encode()
	out.Header.Set("Content-Type", string(kind))
	out.Header.Set("Accept", "application/json")
	return r.send(out, body)
}

// resend puts the record into the body and sends it again.
func (r *recorder) resend(before *http.Response, req *http.Request, body []byte, token fence.Token) (*http.Response, error) {
	with, err := withRecord(body, token)
	if err != nil {
		return before, nil //nolint:nilerr // the server reads more than we do; its answer stands
	}
	_ = before.Body.Close()
	return r.send(req, with)
}

func (r *recorder) send(req *http.Request, body []byte) (*http.Response, error) {
	out := req.Clone(req.Context())
	if req.Body != nil || body != nil {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	}
	return r.next.RoundTrip(out)
}

// withRecord puts the record into the metadata of a body of JSON or YAML.
func withRecord(body []byte, token fence.Token) ([]byte, error) {
	object, err := decode(body)
	if err != nil {
		return nil, err
	}
	annotations, err := annotationsOf(object)
	if err != nil {
		return nil, err
	}
	annotations[fence.AnnotationToken] = token.String()
	return json.Marshal(object)
}

// decode reads a body of JSON or YAML.
func decode(body []byte) (map[string]any, error) {
	if !json.Valid(body) {
		var err error
		if body, err = yaml.YAMLToJSON(body); err != nil {
			return nil, err
		}
	}
	var object map[string]any
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber() // numbers stay as they were written
	if err := decoder.Decode(&object); err != nil {
		return nil, err
	}
	if object == nil {
		return nil, errors.New("it is empty")
	}
	return object, nil
}

// asksForRecord tells whether the fence refused for want of the record.
func asksForRecord(resp *http.Response) (bool, error) {
	return says(resp, string(fence.NotRecorded)+": [", "is not recorded yet", string(fence.FenceRemoved)+": [")
}

// refusedFor tells whether the fence refused for the reason.
func refusedFor(resp *http.Response, reason fence.Reason) (bool, error) {
	return says(resp, string(reason)+": [")
}

// says tells whether a write was refused with one of the texts. It looks into
// the bytes, which hold the message in every encoding.
func says(resp *http.Response, texts ...string) (bool, error) {
	if resp.StatusCode != http.StatusForbidden {
		return false, nil
	}
	body, err := readAll(resp)
	if err != nil {
		return false, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return slices.ContainsFunc(texts, func(text string) bool { return bytes.Contains(body, []byte(text)) }), nil
}

func readAll(resp *http.Response) ([]byte, error) {
	body, err := io.ReadAll(resp.Body)
	return body, errors.Join(err, resp.Body.Close())
}

func readBody(req *http.Request) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	body, err := io.ReadAll(req.Body)
	return body, errors.Join(err, req.Body.Close())
}

func contentType(req *http.Request) string {
	return strings.TrimSpace(strings.Split(req.Header.Get("Content-Type"), ";")[0])
}

func (r *recorder) locate(req *http.Request) (location, bool) {
	return locate(strings.TrimPrefix(req.URL.Path, r.prefix))
}

// location is what a path of the API names.
type location struct {
	// object is the path without the subresource; name is empty where it is a
	// collection's.
	object, name, subresource string
}

// locate reads the path of a resource; false for everything else.
func locate(path string) (location, bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	root := 0
	switch parts[0] {
	case "api":
		root = 2
	case "apis":
		root = 3
	default:
		return location{}, false
	}
	if len(parts) <= root {
		return location{}, false
	}
	// A namespace's own subresources look like kinds inside it.
	inside := len(parts) > root+2 && parts[root] == "namespaces" &&
		(len(parts) > root+3 || parts[root+2] != "status" && parts[root+2] != "finalize")
	if inside {
		root += 2
	}
	at := location{object: "/" + strings.Join(parts[:min(len(parts), root+2)], "/")}
	if len(parts) > root+1 {
		at.name = parts[root+1]
	}
	if len(parts) > root+2 {
		at.subresource = strings.Join(parts[root+2:], "/")
	}
	return at, true
}

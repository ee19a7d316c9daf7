package client

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/fencedlease/fencedlease/fence"
)

// annotator presents the token by annotations, for an account that may not
// impersonate itself. A write whose body can carry them is stamped where a
// lease guards the object: as its label says, in the body or, for patches,
// read before. A deletion is decided by such a write first. What cannot carry
// them is sent as it is, and the answer says what is missing.
type annotator struct {
	recorder
	// account is whom the answer names.
	account string
}

func (a *annotator) RoundTrip(req *http.Request) (*http.Response, error) {
	if !writes(req) || req.Header.Get("Upgrade") != "" {
		return a.next.RoundTrip(req)
	}
	body, err := readBody(req)
	if err != nil {
		return nil, err
	}
	token, err := a.holder.Present()
	if err != nil {
		return nil, notSent(req, err)
	}
	resp, err := a.present(req, body, token)
	if err != nil {
		return nil, err
	}
	return a.explain(req, resp)
}

func (a *annotator) present(req *http.Request, body []byte, token fence.Token) (*http.Response, error) {
	at, ok := a.locate(req)
	switch {
	case !ok:
		return a.send(req, body)
	case req.Method == http.MethodDelete || at.subresource == "eviction":
		if refused, err := a.decide(req, at, token); err != nil || refused != nil {
			return refused, err
		}
		return a.send(req, body)
	case at.subresource != "" && at.subresource != "status":
		return a.send(req, body)
	}
	kind := contentType(req)
	if kind == string(types.JSONPatchType) {
		stored, refused, err := a.stored(req, at)
		switch {
		case err != nil || refused != nil:
			return refused, err
		case !guarded(stored):
			return a.send(req, body)
		}
		return a.stamped(req, body, func(salt string) ([]byte, error) { return stampJSONPatch(body, stored, token, salt) })
	}
	object, err := decode(body)
	if err != nil {
		return a.send(req, body)
	}
	if !labelled(object) {
		if req.Method != http.MethodPatch {
			return a.send(req, body) // a whole object without the label is not guarded
		}
		if stored, refused, err := a.stored(req, at); err != nil || refused != nil {
			return refused, err
		} else if !guarded(stored) {
			return a.send(req, body)
		}
	}
	return a.stamped(req, body, func(salt string) ([]byte, error) {
		if err := stamp(object, token, salt); err != nil {
			return nil, err
		}
		return json.Marshal(object)
	})
}

// stamped sends what do makes of a body, and once more with a salt where the
// write-id presents nothing since it stands there already.
func (a *annotator) stamped(req *http.Request, body []byte, do func(salt string) ([]byte, error)) (*http.Response, error) {
	with, err := do("")
	if err != nil {
		return a.send(req, body)
	}
	resp, err := a.send(req, with)
	if err != nil {
		return nil, err
	}
	if again, err := refusedFor(resp, fence.Unstamped); err != nil || !again {
		return resp, err
	}
	_ = resp.Body.Close()
	if with, err = do(rand.String(10)); err != nil {
		return nil, err
	}
	return a.send(req, with)
}

// decide marks what req deletes: the holder's decision that this very object
// goes, after which the deletion needs no token. It gives the answer that
// stopped it, if one did.
func (a *annotator) decide(req *http.Request, at location, token fence.Token) (*http.Response, error) {
	var all []metav1.PartialObjectMetadata
	if at.name == "" {
		found, refused, err := a.list(req)
		if err != nil || refused != nil {
			return refused, err
		}
		all = found
	} else {
		stored, refused, err := a.stored(req, at)
		if err != nil || refused != nil {
			return refused, err
		}
		all = []metav1.PartialObjectMetadata{*stored}
	}
	for i := range all {
		if !guarded(&all[i]) || all[i].Annotations[fence.AnnotationDeleteToken] == token.String() && fence.Recorded(all[i].Annotations) == token {
			continue
		}
		if req.URL.Query().Has("dryRun") {
			return nil, nil // nothing may be marked; the answer says what is missing
		}
		one := at
		if at.name == "" {
			one.object += "/" + all[i].Name
		}
		mark := map[string]any{"metadata": map[string]any{
			"uid": all[i].UID, "annotations": map[string]any{fence.AnnotationDeleteToken: token.String()},
		}}
		if err := stamp(mark, token, rand.String(10)); err != nil {
			return nil, err
		}
		resp, err := a.record(req, one, types.MergePatchType, mark)
		if err != nil || resp.StatusCode >= http.StatusBadRequest && resp.StatusCode != http.StatusNotFound {
			return resp, err
		}
		_ = resp.Body.Close()
	}
	return nil, nil
}

// stored reads the metadata of the object of a request, empty where there is
// none, or gives the answer that stopped it.
func (a *annotator) stored(req *http.Request, at location) (*metav1.PartialObjectMetadata, *http.Response, error) {
	stored := &metav1.PartialObjectMetadata{}
	get := req.Clone(req.Context())
	get.URL.Path, get.URL.RawPath, get.URL.RawQuery = a.prefix+at.object, "", ""
	refused, err := a.read(get, "PartialObjectMetadata", stored)
	if refused != nil && refused.StatusCode == http.StatusNotFound {
		_ = refused.Body.Close()
		return stored, nil, nil
	}
	return stored, refused, err
}

// explain adds to an answer that asks for a token how this account may present
// one on every path.
func (a *annotator) explain(req *http.Request, resp *http.Response) (*http.Response, error) {
	if asks, err := refusedFor(resp, fence.Unstamped); err != nil || !asks {
		return resp, err
	}
	body, err := readAll(resp)
	if err != nil {
		return nil, err
	}
	var status metav1.Status
	if json.Unmarshal(body, &status) == nil {
		status.Message += fmt.Sprintf("; %q may not impersonate itself to present the token by header, which %s %s needs: kubectl fence rbac %s prints the rule",
			a.account, req.Method, req.URL.Path, a.account)
		if body, err = json.Marshal(status); err != nil {
			return nil, err
		}
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	resp.Header.Del("Content-Length")
	return resp, nil
}

func guarded(o *metav1.PartialObjectMetadata) bool { return o.Labels[fence.LabelLease] != "" }

// labelled tells whether a body carries the label.
func labelled(object map[string]any) bool {
	metadata, _ := object["metadata"].(map[string]any)
	labels, _ := metadata["labels"].(map[string]any)
	lease, _ := labels[fence.LabelLease].(string)
	return lease != ""
}

// stampJSONPatch adds the annotations at the end of a JSON patch.
func stampJSONPatch(body []byte, stored *metav1.PartialObjectMetadata, token fence.Token, salt string) ([]byte, error) {
	var patch []any
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	if err := decoder.Decode(&patch); err != nil {
		return nil, err
	}
	if len(patch) == 0 {
		return nil, errors.New("it is empty")
	}
	const annotations = "/metadata/annotations"
	operation := func(op, path string, value any) any {
		return map[string]any{"op": op, "path": path, "value": value}
	}
	if len(stored.Annotations) == 0 {
		// The test keeps it from replacing what came there in between.
		patch = slices.Concat([]any{operation("test", annotations, nil), operation("add", annotations, map[string]any{})}, patch)
	}
	for _, set := range [][2]string{{"token", token.String()}, {"write-id", writeID(body, token.String()+salt)}} {
		patch = append(patch, operation("add", annotations+"/"+fence.Group+"~1"+set[0], set[1]))
	}
	return json.Marshal(patch)
}

package fencecli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/printers"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/pager"
	crclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

type verifyOptions struct {
	*cli
	allNamespaces bool
	fix           bool
	reason        string
	namespace     string
}

func newVerify(c *cli) *cobra.Command {
	o := &verifyOptions{cli: c}
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare the token recorded on every guarded object with its lease",
		Long: "Reads the metadata of every guarded object and of its lease, and lists the records that no authority issued. Above\n" +
			"the lease's current token (from another cluster or a restored backup) they keep the honest holder out, and --fix\n" +
			"lowers them to it: a bypass, which needs the verb \"" + fence.VerbBypass + "\" on the lease and a reason. Malformed ones count as\n" +
			"none until the holder's next write. Objects of a lease that does not exist, or does not allow their namespace, wait\n" +
			"for it. Where anything is left the command ends with code 1.",
		Example: "  kubectl fence verify -A\n  kubectl fence verify --fix --reason='restored from the backup of Monday'",
		Args:    cobra.NoArgs,
		RunE:    run(o),
	}
	cmd.Flags().BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "verify the objects of every namespace, and those of none")
	cmd.Flags().BoolVar(&o.fix, "fix", false, "lower records above the current token")
	cmd.Flags().StringVar(&o.reason, "reason", "", "why, for those who read it later (required with --fix)")
	return cmd
}

func (o *verifyOptions) Complete(*cobra.Command, []string) (err error) {
	if !o.allNamespaces {
		o.namespace, err = o.cli.namespace()
	}
	return err
}

func (o *verifyOptions) Validate() error {
	if !o.fix {
		if o.reason != "" {
			return errors.New("--reason is for --fix")
		}
		return nil
	}
	return validReason(o.reason)
}

// finding is a record that no authority issued.
type finding struct {
	resource schema.GroupVersionResource
	object   *metav1.PartialObjectMetadata
	lease    types.NamespacedName
	current  fence.Token
	reason   fence.Reason
}

// fixable: only a record above the current token keeps the holder out. A
// malformed one counts as none, and the holder's next write replaces it.
func (f finding) fixable() bool { return f.reason == fence.UnissuedToken }

func (o *verifyOptions) Run(ctx context.Context) error {
	cfg, api, err := o.connect()
	if err != nil {
		return err
	}
	resources, err := o.resources()
	if err != nil {
		return err
	}
	objects, err := metadata.NewForConfig(cfg)
	if err != nil {
		return err
	}
	known := newLeases(api)
	var findings []finding
	checked := 0
	for _, r := range resources {
		if err := o.list(ctx, objects, r, func(obj *metav1.PartialObjectMetadata) error {
			checked++
			f, err := judgeRecord(ctx, known, r, obj)
			if f != nil {
				findings = append(findings, *f)
			}
			return err
		}); err != nil {
			return fmt.Errorf("list guarded %s: %w", r.GroupResource(), err)
		}
	}
	return o.report(ctx, objects, findings, checked)
}

// resources are the kinds whose objects can be listed and changed.
func (o *verifyOptions) resources() ([]schema.GroupVersionResource, error) {
	client, err := o.config.ToDiscoveryClient()
	if err != nil {
		return nil, err
	}
	// Kinds left out of a check would look like kinds without findings.
	lists, err := client.ServerPreferredResources()
	if err != nil {
		return nil, fmt.Errorf("find out the kinds: %w", err)
	}
	lists = discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "patch"}}, lists)
	var out []schema.GroupVersionResource
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if r.Namespaced || o.allNamespaces {
				out = append(out, gv.WithResource(r.Name))
			}
		}
	}
	return out, nil
}

// list calls do for every guarded object of a kind.
func (o *verifyOptions) list(ctx context.Context, objects metadata.Interface, r schema.GroupVersionResource, do func(*metav1.PartialObjectMetadata) error) error {
	p := pager.New(func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return objects.Resource(r).Namespace(o.namespace).List(ctx, options)
	})
	return p.EachListItem(ctx, metav1.ListOptions{LabelSelector: fence.LabelLease}, func(obj runtime.Object) error {
		return do(obj.(*metav1.PartialObjectMetadata))
	})
}

// judgeRecord judges what stands on an object as if it were presented: to be
// older than the current token is all right, everything else is not.
func judgeRecord(ctx context.Context, known *leases, r schema.GroupVersionResource, obj *metav1.PartialObjectMetadata) (*finding, error) {
	key, _ := guardOf(obj)
	l, err := known.get(ctx, key)
	if err != nil {
		return nil, err
	}
	facts := factsOf(key, l, obj.Namespace)
	facts.DenyLapsed = false
	f := &finding{resource: r, object: obj, lease: key, current: facts.Current}
	if !facts.Found {
		f.reason = fence.UnknownLease
		return f, nil
	}
	for _, name := range []string{fence.AnnotationToken, fence.AnnotationFloor} {
		text, recorded := obj.Annotations[name]
		if !recorded {
			continue
		}
		v := fence.Judge(fence.Presented{Stamped: true, Text: text, ByHeader: true}, 0, facts, fence.Policy{Live: true})
		// A token between the current one and minToken was issued by nobody,
		// but the next one is above it: it locks nobody out.
		if v.Reason == fence.MalformedToken || v.Reason == fence.UnissuedToken {
			f.reason = v.Reason
			return f, nil
		}
	}
	return nil, nil
}

// report prints the findings, mended where that was asked for.
func (o *verifyOptions) report(ctx context.Context, objects metadata.Interface, findings []finding, checked int) error {
	if len(findings) == 0 {
		fmt.Fprintf(o.Out, "%d guarded objects, every record in order\n", checked)
		return nil
	}
	t := newTable("Object", "Lease", "Recorded", "Current", "Finding")
	var errs []error
	left := 0
	for i, f := range findings {
		name, told := f.resource.GroupResource().String()+"/"+f.object.Name, string(f.reason)
		switch {
		case !o.fix || !f.fixable():
			left++
		default:
			if err := o.mend(ctx, objects, f); err != nil {
				left++
				errs = append(errs, fmt.Errorf("mend %s: %w", name, err))
				break
			}
			told += ", mended"
		}
		t.row(name, f.lease.String(), recordText(f.object), f.current.String(), told)
		t.Rows[i].Object.Object = f.object
	}
	if err := o.printTable(t, printers.PrintOptions{WithNamespace: o.allNamespaces}); err != nil {
		return err
	}
	if left > 0 {
		errs = append(errs, fmt.Errorf("%d of %d guarded objects have a record that no authority issued", left, checked))
	}
	return errors.Join(errs...)
}

// recordText is what stands on an object, malformed or not.
func recordText(obj crclient.Object) string {
	token, floor := obj.GetAnnotations()[fence.AnnotationToken], obj.GetAnnotations()[fence.AnnotationFloor]
	switch {
	case token == "" && floor == "":
		return none
	case floor == "":
		return fmt.Sprintf("%q", token)
	}
	return fmt.Sprintf("%q, floor %q", token, floor)
}

// mend lowers what stands above the current token to it, or takes it off where
// none was issued, by a bypass.
func (o *verifyOptions) mend(ctx context.Context, objects metadata.Interface, f finding) error {
	annotations := map[string]any{fence.AnnotationBypass: o.bypass(o.reason)}
	for _, name := range []string{fence.AnnotationToken, fence.AnnotationFloor} {
		if token, err := fence.ParseToken(f.object.Annotations[name]); err != nil || token <= f.current {
			continue
		}
		annotations[name] = nil
		if f.current > 0 && name == fence.AnnotationToken {
			annotations[name] = f.current.String()
		}
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"resourceVersion": f.object.ResourceVersion, "annotations": annotations,
	}})
	if err != nil {
		return err
	}
	_, err = objects.Resource(f.resource).Namespace(f.object.Namespace).
		Patch(ctx, f.object.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: fieldManager})
	return err
}

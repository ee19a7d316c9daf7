package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/operator"
)

const (
	namespace = "default"
	leaseName = "scheduler"
	// leaseSeconds is short, so that the story is.
	leaseSeconds = 2
)

// answer is one line of a worker's standard output.
type answer struct {
	Token int64  `json:"token,omitempty"`
	Error string `json:"error,omitempty"`
}

// work is a worker process: it obeys one command a line.
//
//	acquire             claims the lease, waits for its token and renews
//	check               asks the API server whether it holds, as careful programs do
//	write OBJECT VALUE  writes with the token that it got, without asking again
//	release             gives the lease back
func work(ctx context.Context, name string, in io.Reader, out io.Writer) error {
	cfg, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: operator.Scheme()})
	if err != nil {
		return err
	}
	w := &worker{client: c, name: name}
	commands := bufio.NewScanner(in)
	for commands.Scan() {
		err := w.obey(ctx, strings.Fields(commands.Text()))
		a := answer{Token: w.token}
		if err != nil {
			a.Error = err.Error()
		}
		if err := json.NewEncoder(out).Encode(a); err != nil {
			return err
		}
	}
	return commands.Err()
}

type worker struct {
	client client.WithWatch
	name   string
	claim  *v1alpha1.LeaseClaim
	token  int64
}

func (w *worker) obey(ctx context.Context, command []string) error {
	switch {
	case len(command) == 1 && command[0] == "acquire":
		return w.acquire(ctx)
	case len(command) == 1 && command[0] == "check":
		return w.check(ctx)
	case len(command) == 3 && command[0] == "write":
		return w.write(ctx, command[1], command[2])
	case len(command) == 1 && command[0] == "release":
		return w.client.Delete(ctx, w.claim, client.Preconditions{UID: &w.claim.UID})
	}
	return fmt.Errorf("unknown command %q", command)
}

func (w *worker) acquire(ctx context.Context) error {
	w.claim = &v1alpha1.LeaseClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: w.name + "-"},
		Spec:       v1alpha1.LeaseClaimSpec{LeaseName: leaseName, HolderIdentity: "worker-" + w.name},
	}
	if err := w.client.Create(ctx, w.claim); err != nil {
		return err
	}
	watch, err := w.client.Watch(ctx, &v1alpha1.LeaseClaimList{}, client.InNamespace(namespace),
		client.MatchingFields{"metadata.name": w.claim.Name})
	if err != nil {
		return err
	}
	defer watch.Stop()
	for event := range watch.ResultChan() {
		claim, ok := event.Object.(*v1alpha1.LeaseClaim)
		if !ok {
			return apierrors.FromObject(event.Object)
		}
		if holds(claim) {
			w.token = claim.Status.Token
			go w.renew(ctx)
			return nil
		}
	}
	return fmt.Errorf("the watch of claim %s ended: %w", w.claim.Name, ctx.Err())
}

func (w *worker) renew(ctx context.Context) {
	tick := time.NewTicker(leaseSeconds * time.Second / 3)
	defer tick.Stop()
	for range tick.C {
		patch := fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(metav1.RFC3339Micro))
		// A refused renewal changes nothing here: this worker believes what
		// it checked last, as a paused one does.
		_ = w.client.Patch(ctx, w.claim.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
	}
}

func (w *worker) check(ctx context.Context) error {
	claim := &v1alpha1.LeaseClaim{}
	if err := w.client.Get(ctx, client.ObjectKeyFromObject(w.claim), claim); err != nil {
		return err
	}
	if !holds(claim) {
		return fmt.Errorf("claim %s does not hold the lease", claim.Name)
	}
	return nil
}

func (w *worker) write(ctx context.Context, object, value string) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{
			fence.AnnotationToken:   strconv.FormatInt(w.token, 10),
			fence.AnnotationWriteID: w.name + "-" + strconv.FormatInt(w.token, 10) + "-" + value,
		}},
		"data": map[string]string{"batch": value},
	})
	if err != nil {
		return err
	}
	target := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: object}}
	return w.client.Patch(ctx, target, client.RawPatch(types.MergePatchType, patch))
}

func holds(claim *v1alpha1.LeaseClaim) bool {
	for _, c := range claim.Status.Conditions {
		if c.Type == v1alpha1.LeaseClaimHeld {
			return c.Status == metav1.ConditionTrue
		}
	}
	return false
}

package controllers

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// FloorName is the name of the ConfigMap that holds the cluster-wide floor of
// first tokens, in the operator's namespace.
const FloorName = "fencedlease-floor"

// floorKey is its one key, a token in canonical form.
const floorKey = "token"

// floor keeps the highest token that ran ahead of the store's revision. It is
// always read live.
type floor struct {
	client    client.Client
	live      client.Reader
	namespace string
}

// read gives the floor, 0 where none was ever raised.
func (f *floor) read(ctx context.Context) (fence.Token, error) {
	_, token, err := f.get(ctx)
	return token, err
}

func (f *floor) get(ctx context.Context) (*corev1.ConfigMap, fence.Token, error) {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: FloorName}}
	if err := f.live.Get(ctx, client.ObjectKeyFromObject(cm), cm); apierrors.IsNotFound(err) {
		return cm, 0, nil
	} else if err != nil {
		return nil, 0, f.unavailable(err)
	}
	token, err := fence.ParseToken(cm.Data[floorKey])
	if err != nil {
		return nil, 0, f.unavailable(fmt.Errorf("key %s: %w; set it above every token of the cluster", floorKey, err))
	}
	return cm, token, nil
}

// raise makes the floor at least token. All leases whose tokens run ahead raise
// the one floor, so a conflict is tried again at once.
func (f *floor) raise(ctx context.Context, token fence.Token) error {
	again := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	return retry.OnError(retry.DefaultBackoff, again, func() error {
		cm, before, err := f.get(ctx)
		if err != nil || before >= token {
			return err
		}
		cm.Data = map[string]string{floorKey: token.String()}
		if cm.ResourceVersion == "" {
			err = f.client.Create(ctx, cm)
		} else {
			err = f.client.Update(ctx, cm)
		}
		if err != nil && !again(err) {
			return f.unavailable(err)
		}
		return err
	})
}

func (f *floor) unavailable(err error) error {
	return &cannotIssueError{v1alpha1.ReasonFloorUnavailable, fmt.Sprintf("ConfigMap %s/%s: %v", f.namespace, FloorName, err)}
}

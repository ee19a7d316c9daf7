// Worker is a batch job of which one run at a time may do its work: it waits
// for its turn, books an order in PostgreSQL, has a partner charge it through
// the gateway, and notes that in a ConfigMap. Each of the three refuses it once
// another run has taken over.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fencedlease/fencedlease/client"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/sqlfence"
)

type worker struct {
	cfg             *rest.Config
	namespace, name string
	// gateway is the base URL of the side-effect gateway.
	gateway string
	db      *sql.DB
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := start(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context) (err error) {
	w := &worker{namespace: os.Getenv("POD_NAMESPACE"), name: os.Getenv("POD_NAME"), gateway: os.Getenv("GATEWAY")}
	w.cfg, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil).ClientConfig()
	if err != nil {
		return err
	}
	if w.db, err = sql.Open("pgx", os.Getenv("DATABASE")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.db.Close()) }()
	return w.run(ctx)
}

func (w *worker) run(ctx context.Context) error {
	return client.Run(ctx, w.cfg, w.namespace, "books", w.work,
		client.WithIdentity(w.name), client.WithWait(10*time.Minute))
}

// work runs while the lease is held; ctx ends with the lease.
func (w *worker) work(ctx context.Context, held *client.Held) error {
	for _, step := range []func(context.Context, *client.Held) error{w.book, w.charge, w.note} {
		if err := settled(ctx, held, step); err != nil {
			return err
		}
	}
	return nil
}

// settled does a step until it is known whether it happened. The step has to
// be one that may happen twice.
func settled(ctx context.Context, held *client.Held, step func(context.Context, *client.Held) error) error {
	for {
		err := client.Outcome(step(ctx, held))
		if !errors.Is(err, fence.ErrOutcomeUnknown) {
			return err
		}
		// What was sent may still arrive. With a higher token the step shuts it
		// out, wherever it arrives after this one.
		if _, err := held.Reaffirm(ctx); err != nil {
			return err
		}
	}
}

func (w *worker) book(ctx context.Context, held *client.Held) error {
	tx, err := sqlfence.Begin(ctx, w.db, nil, held)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO orders VALUES (7) ON CONFLICT DO NOTHING"); err != nil {
		return errors.Join(sqlfence.Error(err), tx.Rollback())
	}
	return sqlfence.CommitError(tx.Commit())
}

func (w *worker) charge(ctx context.Context, held *client.Held) error {
	token, err := held.Present()
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.gateway+"/charges", strings.NewReader(`{"order":7}`))
	if err != nil {
		return err
	}
	req.Header.Set(fence.HeaderLease, held.Lease())
	req.Header.Set(fence.HeaderToken, token.String())
	req.Header.Set("Idempotency-Key", "order-7")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("charge order 7: %s", resp.Status)
	}
	return nil
}

func (w *worker) note(ctx context.Context, held *client.Held) error {
	cfg, err := client.Config(ctx, w.cfg, held)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	_, err = kube.CoreV1().ConfigMaps(w.namespace).Patch(ctx, "orders", types.MergePatchType, []byte(`{"data":{"7":"charged"}}`), metav1.PatchOptions{})
	return err
}

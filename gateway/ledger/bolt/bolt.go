// Package bolt is the embedded ledger: one file, for one gateway process.
//
// A token is synced to disk before Advance returns, and survives kill -9 and
// power loss as far as the disk keeps what it has synced. Reads sync nothing.
// A second process that opens the file is refused; replicas need a ledger that
// they share.
package bolt

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"k8s.io/utils/clock"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// Buckets. Keys of one lease have a bucket of their own in "keys", so that
// dropping them costs no walk.
var (
	leases   = []byte("leases")   // lease -> record
	keys     = []byte("keys")     // lease -> key -> token
	outcomes = []byte("outcomes") // call -> time until it is kept, outcome
	expiry   = []byte("expiry")   // the same time, call -> nothing
)

// Options are the settings of a ledger.
type Options struct {
	// Keep is how long outcomes are remembered.
	Keep time.Duration
	// MaxKeys stands in for ledger.MaxKeys where it is not 0.
	MaxKeys uint64
	// Clock stands in for the real one where it is not nil. It decides how
	// long outcomes are kept, and nothing else.
	Clock clock.PassiveClock
}

// Ledger is a ledger in a file.
type Ledger struct {
	db      *bbolt.DB
	options Options

	recent           *recent
	writes           chan *write
	closing, stopped chan struct{}
}

var _ ledger.Ledger = (*Ledger)(nil)

// write is a change that waits for the next commit.
type write struct {
	change func(*bbolt.Tx) error
	done   chan error
}

// lockTimeout bounds how long Open waits for a process that still ends.
const lockTimeout = 2 * time.Second

// Open opens the ledger in a file, or makes it.
func Open(file string, options Options) (*Ledger, error) {
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{Timeout: lockTimeout, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open the ledger %s: another process has it open; replicas share a PostgreSQL ledger instead", file)
	} else if err != nil {
		return nil, fmt.Errorf("open the ledger %s: %w", file, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{leases, keys, outcomes, expiry} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up the ledger %s: %w", file, err), db.Close())
	}
	if options.MaxKeys == 0 {
		options.MaxKeys = ledger.MaxKeys
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	l := &Ledger{db: db, options: options, recent: newRecent(), writes: make(chan *write, mostWrites), closing: make(chan struct{}), stopped: make(chan struct{})}
	go l.commit()
	return l, nil
}

// Close ends the ledger. Changes that still wait fail.
func (l *Ledger) Close() error {
	close(l.closing)
	<-l.stopped
	return l.db.Close()
}

// Ready always is: the file is open.
func (l *Ledger) Ready(context.Context) error { return nil }

// mostWrites bounds how many changes share one commit.
const mostWrites = 1024

// commit makes all changes that wait durable at once: while one sync runs, the
// next batch gathers.
func (l *Ledger) commit() {
	defer close(l.stopped)
	for {
		var batch []*write
		select {
		case w := <-l.writes:
			batch = append(batch, w)
		case <-l.closing:
			return
		}
		for len(batch) < mostWrites && len(l.writes) > 0 {
			batch = append(batch, <-l.writes)
		}
		if err := l.apply(batch...); err == nil || len(batch) == 1 {
			for _, w := range batch {
				w.done <- err
			}
			continue
		}
		for _, w := range batch { // one that fails fails alone
			w.done <- l.apply(w)
		}
	}
}

func (l *Ledger) apply(batch ...*write) error {
	return l.db.Update(func(tx *bbolt.Tx) error {
		for _, w := range batch {
			if err := w.change(tx); err != nil {
				return err
			}
		}
		return nil
	})
}

// update runs a change in the next commit and returns once it is durable, or
// has failed. A commit is not given up half-way: only before it does ctx count.
func (l *Ledger) update(ctx context.Context, change func(*bbolt.Tx) error) error {
	w := &write{change: change, done: make(chan error, 1)}
	select {
	case l.writes <- w:
	case <-l.closing:
		return errClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-w.done:
		return err
	case <-l.stopped:
		return errClosed
	}
}

var errClosed = errors.New("the ledger is closed")

// record is what is kept of a lease.
type record struct {
	// floor is recorded for every key.
	floor fence.Token
	// high is the highest token of the keys recorded each for itself, and
	// count their number.
	high  fence.Token
	count uint64
}

func readRecord(tx *bbolt.Tx, lease string) record {
	v := tx.Bucket(leases).Get([]byte(lease))
	if len(v) != 24 {
		return record{}
	}
	return record{
		floor: fence.Token(binary.BigEndian.Uint64(v)), high: fence.Token(binary.BigEndian.Uint64(v[8:])),
		count: binary.BigEndian.Uint64(v[16:]),
	}
}

func (r record) write(tx *bbolt.Tx, lease string) error {
	v := binary.BigEndian.AppendUint64(make([]byte, 0, 24), uint64(r.floor))
	v = binary.BigEndian.AppendUint64(v, uint64(r.high))
	return tx.Bucket(leases).Put([]byte(lease), binary.BigEndian.AppendUint64(v, r.count))
}

// own is the token recorded for a key itself.
func own(tx *bbolt.Tx, id ledger.ID) fence.Token {
	if b := tx.Bucket(keys).Bucket([]byte(id.Lease)); b != nil {
		if v := b.Get([]byte(id.Key)); len(v) == 8 {
			return fence.Token(binary.BigEndian.Uint64(v))
		}
	}
	return 0
}

// Recorded reads the record of a key.
func (l *Ledger) Recorded(_ context.Context, id ledger.ID) (recorded fence.Token, err error) {
	recorded, changes, ok := l.recent.get(id)
	if ok {
		return recorded, nil
	}
	err = l.db.View(func(tx *bbolt.Tx) error {
		recorded = max(readRecord(tx, id.Lease).floor, own(tx, id))
		return nil
	})
	if err == nil {
		l.recent.keep(id, recorded, changes)
	}
	return recorded, err
}

// Advance records a token.
func (l *Ledger) Advance(ctx context.Context, id ledger.ID, token fence.Token, wholeLease bool) (recorded fence.Token, err error) {
	err = l.update(ctx, func(tx *bbolt.Tx) error {
		r := readRecord(tx, id.Lease)
		recorded = max(r.floor, own(tx, id))
		if token <= recorded {
			return nil
		}
		recorded = token
		if wholeLease {
			r.floor = token
		} else {
			b, err := tx.Bucket(keys).CreateBucketIfNotExists([]byte(id.Lease))
			if err != nil {
				return err
			}
			if b.Get([]byte(id.Key)) == nil {
				r.count++
			}
			if err := b.Put([]byte(id.Key), binary.BigEndian.AppendUint64(nil, uint64(token))); err != nil {
				return err
			}
			if r.high = max(r.high, token); r.count > l.options.MaxKeys {
				r.floor = max(r.floor, r.high)
			}
		}
		if r.count > 0 && r.floor >= r.high { // the lease's record covers all of them
			if err := tx.Bucket(keys).DeleteBucket([]byte(id.Lease)); err != nil {
				return err
			}
			r.high, r.count = 0, 0
		}
		return r.write(tx, id.Lease)
	})
	l.recent.changed()
	if err != nil {
		return 0, fmt.Errorf("record token %s of [%s]: %w", token, id.Lease, err)
	}
	return recorded, nil
}

// Enter has no other replica to wait for.
func (l *Ledger) Enter(ctx context.Context, id ledger.ID, _ fence.Token, _ func()) (fence.Token, func(), error) {
	recorded, err := l.Recorded(ctx, id)
	return recorded, func() {}, err
}

// callKey is the key of a call. No part holds a zero byte.
func callKey(id ledger.CallID) []byte {
	return bytes.Join([][]byte{[]byte(id.Lease), []byte(id.Key), []byte(id.IdempotencyKey)}, []byte{0})
}

// mostExpired bounds what one change drops, so that none takes long.
const mostExpired = 16

// Begin notes a call that is about to leave.
func (l *Ledger) Begin(ctx context.Context, id ledger.CallID, attempt ledger.Attempt) (known *ledger.Outcome, err error) {
	err = l.update(ctx, func(tx *bbolt.Tx) error {
		known = nil
		now := l.options.Clock.Now()
		if err := dropExpired(tx, now); err != nil {
			return err
		}
		if v := tx.Bucket(outcomes).Get(callKey(id)); v != nil {
			known = &ledger.Outcome{}
			return json.Unmarshal(v[8:], known)
		}
		until := binary.BigEndian.AppendUint64(nil, uint64(now.Add(l.options.Keep).UnixNano()))
		if err := tx.Bucket(expiry).Put(slices.Concat(until, callKey(id)), nil); err != nil {
			return err
		}
		return putOutcome(tx, id, until, ledger.Outcome{Attempt: attempt})
	})
	if err != nil {
		return nil, fmt.Errorf("note a call of [%s]: %w", id.Lease, err)
	}
	return known, nil
}

func putOutcome(tx *bbolt.Tx, id ledger.CallID, until []byte, o ledger.Outcome) error {
	v, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return tx.Bucket(outcomes).Put(callKey(id), slices.Concat(until, v))
}

func dropExpired(tx *bbolt.Tx, now time.Time) error {
	cursor := tx.Bucket(expiry).Cursor()
	for range mostExpired {
		k, _ := cursor.First()
		if k == nil || binary.BigEndian.Uint64(k) > uint64(now.UnixNano()) {
			return nil
		}
		// A call that was forgotten and begun again is kept longer.
		if v := tx.Bucket(outcomes).Get(k[8:]); v != nil && bytes.Equal(v[:8], k[:8]) {
			if err := tx.Bucket(outcomes).Delete(k[8:]); err != nil {
				return err
			}
		}
		if err := cursor.Delete(); err != nil {
			return err
		}
	}
	return nil
}

// Finish records the answer of a call.
func (l *Ledger) Finish(ctx context.Context, id ledger.CallID, answer ledger.Answer) error {
	err := l.update(ctx, func(tx *bbolt.Tx) error {
		v := tx.Bucket(outcomes).Get(callKey(id))
		if v == nil {
			return nil // its time is over
		}
		var o ledger.Outcome
		if err := json.Unmarshal(v[8:], &o); err != nil {
			return err
		}
		o.Answer = &answer
		return putOutcome(tx, id, v[:8], o)
	})
	if err != nil {
		return fmt.Errorf("record the outcome of a call of [%s]: %w", id.Lease, err)
	}
	return nil
}

// Forget drops a call of which nothing was sent.
func (l *Ledger) Forget(ctx context.Context, id ledger.CallID) error {
	err := l.update(ctx, func(tx *bbolt.Tx) error { return tx.Bucket(outcomes).Delete(callKey(id)) })
	if err != nil {
		return fmt.Errorf("forget a call of [%s]: %w", id.Lease, err)
	}
	return nil
}

// Package postgres is the ledger that several gateway replicas share: a
// PostgreSQL database with the SQL fence in it.
//
// A lease's record is the SQL fence's own, so whoever has written to the
// database under a newer token has also shut the older one out of the gateway,
// and the other way round. Each call in flight holds a database session with a
// shared lock on its key; a newer token takes the lock for itself first. A
// replica that is killed loses its sessions and so its locks. One that is
// stopped, or cut off, is waited for up to a limit, and then its session is
// ended, and with it the call as soon as the replica runs again. What it has
// sent by then cannot be taken back: past the limit the partner alone, by the
// token that it gets with each call, can still tell an older one.
package postgres

import (
	"context"
	_ "embed" // the schema
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
	"github.com/fencedlease/fencedlease/sqlfence"
)

// Schema is the DDL of the ledger's own tables. sqlfence.Schema comes first.
//
//go:embed schema.sql
var Schema string

// Options are the settings of a ledger.
type Options struct {
	// Wait bounds how long a newer token waits for older calls in flight, in
	// any replica, before they are ended.
	Wait time.Duration
	// Keep is how long outcomes are remembered.
	Keep time.Duration
	// MaxKeys stands in for ledger.MaxKeys where it is not 0.
	MaxKeys int64
}

// How many sessions a replica uses where the URL does not say
// (pool_max_conns): one for each call in flight, and some for questions.
const (
	mostCalls     = 50
	mostQuestions = 8
)

// endLimit bounds how long a call may take to end once it is told to.
const endLimit = 5 * time.Second

// channel tells replicas to end older calls.
const channel = "fence_gateway"

// Locks of a key: of its calls in flight, and of who advances it.
const (
	callLock    = "pg_catalog.hashtextextended(pg_catalog.concat($1::text, '|', $2::text), 439804651366)"
	advanceLock = "pg_catalog.hashtextextended(pg_catalog.concat($1::text, '|', $2::text), 439804651367)"
)

// selectRecorded gives the token of the lease and that of the key.
const selectRecorded = `SELECT coalesce((SELECT token FROM fence.lease WHERE lease = $1), 0),
  coalesce((SELECT token FROM fence.call_key WHERE lease = $1 AND key = $2), 0)`

// Ledger is a ledger in PostgreSQL.
type Ledger struct {
	options   Options
	end       time.Duration
	calls     *pgxpool.Pool
	questions *pgxpool.Pool
	inserted  atomic.Int64
}

var _ ledger.Ledger = (*Ledger)(nil)

// Open connects to the database and finds the tables there. The connection has
// to be to PostgreSQL itself, not to a proxy that pools by transaction.
func Open(ctx context.Context, url string, options Options) (_ *Ledger, err error) {
	if options.MaxKeys == 0 {
		options.MaxKeys = ledger.MaxKeys
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("open the ledger: the URL is not one of PostgreSQL") // it may hold a password
	}
	if !strings.Contains(url, "pool_max_conns") {
		config.MaxConns = mostCalls
	}
	// Each statement has to see what was committed before it got its lock.
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "read committed"
	questions := config.Copy()
	questions.MaxConns = mostQuestions
	config.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "LISTEN "+channel)
		return err
	}
	l := &Ledger{options: options, end: endLimit}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the ledger: %w", err), l.Close())
		}
	}()
	if l.questions, err = pgxpool.NewWithConfig(ctx, questions); err != nil {
		return nil, err
	}
	if l.calls, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	var there bool
	if err := l.questions.QueryRow(ctx, "SELECT pg_catalog.to_regclass('fence.lease') IS NOT NULL AND pg_catalog.to_regclass('fence.call_outcome') IS NOT NULL").Scan(&there); err != nil {
		return nil, err
	}
	if !there {
		return nil, errors.New("the database lacks its tables; print them with fencedlease gateway schema")
	}
	return l, nil
}

// Close ends every session.
func (l *Ledger) Close() error {
	for _, pool := range []*pgxpool.Pool{l.calls, l.questions} {
		if pool != nil {
			pool.Close()
		}
	}
	return nil
}

// Ready asks the database.
func (l *Ledger) Ready(ctx context.Context) error {
	if err := l.questions.Ping(ctx); err != nil {
		return fmt.Errorf("reach the ledger: %w", err)
	}
	return nil
}

// querier is a session, a transaction or a pool.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// tokens gives the token of the lease and that of the key.
func tokens(ctx context.Context, q querier, id ledger.ID) (lease, key fence.Token, err error) {
	err = q.QueryRow(ctx, selectRecorded, id.Lease, id.Key).Scan(&lease, &key)
	return lease, key, err
}

// Recorded reads the record of a key.
func (l *Ledger) Recorded(ctx context.Context, id ledger.ID) (fence.Token, error) {
	lease, key, err := tokens(ctx, l.questions, id)
	if err != nil {
		return 0, fmt.Errorf("read the record of [%s]: %w", id.Lease, err)
	}
	return max(lease, key), nil
}

// Advance records a token.
func (l *Ledger) Advance(ctx context.Context, id ledger.ID, token fence.Token, wholeLease bool) (recorded fence.Token, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("record token %s of [%s]: %w", token, id.Lease, err)
		}
	}()
	if !wholeLease {
		return l.session(ctx, func(c *pgx.Conn) (fence.Token, error) { return l.settle(ctx, c, id, token) })
	}
	if recorded, err = l.Recorded(ctx, id); err != nil || recorded >= token {
		return recorded, err
	}
	if err := l.present(ctx, id.Lease, token); err != nil {
		return 0, err
	}
	return l.Recorded(ctx, id)
}

// present advances the lease's record as a writer to the database does: once
// older transactions have ended. A higher one stays.
func (l *Ledger) present(ctx context.Context, lease string, token fence.Token) error {
	_, err := l.questions.Exec(ctx, sqlfence.PresentSQL, lease, int64(token))
	if reason, ok := sqlfence.Reason(err); ok && reason == fence.StaleToken {
		return nil
	}
	return sqlfence.Error(err)
}

// session lends a session for calls.
func (l *Ledger) session(ctx context.Context, do func(*pgx.Conn) (fence.Token, error)) (fence.Token, error) {
	c, err := l.acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer c.Release()
	return do(c.Conn())
}

func (l *Ledger) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, l.options.Wait+l.end, errors.New("every session of the ledger has a call in flight"))
	defer cancel()
	c, err := l.calls.Acquire(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return c, err
}

// settle makes token the one of the key's calls in flight, once the older ones
// have ended, and gives what is recorded then.
func (l *Ledger) settle(ctx context.Context, c *pgx.Conn, id ledger.ID, token fence.Token) (recorded fence.Token, err error) {
	isNew := false
	err = pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
		// Whoever advances has the lock until the row is committed, so those who
		// come with the same token find it there and do not wait for each other.
		if err := lock(ctx, tx, id, advanceLock, l.options.Wait+2*l.end); err != nil {
			return err
		}
		lease, key, err := tokens(ctx, tx, id)
		if err != nil {
			return err
		}
		if recorded = max(lease, key); recorded > token || key == token {
			return nil
		}
		if err := l.drain(ctx, tx, id, token); err != nil {
			return err
		}
		recorded, isNew = token, key == 0
		_, err = tx.Exec(ctx, `INSERT INTO fence.call_key VALUES ($1, $2, $3)
			ON CONFLICT (lease, key) DO UPDATE SET token = excluded.token`, id.Lease, id.Key, int64(token))
		return err
	})
	if err == nil && isNew && l.inserted.Add(1)%max(1, l.options.MaxKeys/100) == 0 {
		err = l.compact(ctx, id.Lease)
	}
	return recorded, err
}

// lock takes a lock of the transaction.
func lock(ctx context.Context, tx pgx.Tx, id ledger.ID, which string, limit time.Duration) error {
	if _, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('lock_timeout', $1, true)", fmt.Sprint(max(1, limit.Milliseconds()))); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock("+which+")", id.Lease, id.Key)
	return err
}

// drain waits until no call of the key is in flight: all of them are older. Past
// the limit replicas are told to end theirs, and past another the sessions of
// those that do not are ended.
func (l *Ledger) drain(ctx context.Context, tx pgx.Tx, id ledger.ID, token fence.Token) error {
	limit := l.options.Wait
	for _, harder := range []string{
		"SELECT pg_catalog.pg_notify('" + channel + "', pg_catalog.concat($3::text, ' ', $1::text, ' ', $2::text))",
		`SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_locks
		  WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' AND granted AND $3::text <> ''
		    AND (classid::bigint << 32 | objid::bigint) = ` + callLock + `
		    AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())`,
		"",
	} {
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return lock(ctx, tx, id, callLock, limit) })
		if pg, ok := errors.AsType[*pgconn.PgError](err); !ok || pg.Code != "55P03" {
			return err
		}
		if harder == "" {
			return errors.New("an older call in flight did not end")
		}
		// By another session: this one's notice would wait for the commit.
		if _, err := l.questions.Exec(ctx, harder, id.Lease, id.Key, fmt.Sprint(int64(token))); err != nil {
			return err
		}
		limit = l.end
	}
	return nil
}

// mostTrimmed bounds how many locks one statement takes.
const mostTrimmed = 500

// compact raises the lease's record to the highest token of its keys where they
// are too many, and drops those that it covers.
func (l *Ledger) compact(ctx context.Context, lease string) error {
	var count int64
	var high fence.Token
	err := l.questions.QueryRow(ctx, "SELECT count(*), coalesce(max(token), 0) FROM fence.call_key WHERE lease = $1", lease).Scan(&count, &high)
	if err != nil || count <= l.options.MaxKeys {
		return err
	}
	if err := l.present(ctx, lease, high); err != nil {
		return err
	}
	for {
		// A key with a call in flight stays: its row says that there is none
		// older.
		trimmed, err := l.questions.Exec(ctx, `
			WITH covered AS MATERIALIZED (
			  SELECT k.lease, k.key FROM fence.call_key k JOIN fence.lease l ON l.lease = k.lease
			  WHERE k.lease = $1 AND k.token <= l.token LIMIT $2
			), free AS MATERIALIZED (
			  SELECT lease, key FROM covered
			  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(pg_catalog.concat(lease, '|', key), 439804651366))
			)
			DELETE FROM fence.call_key k USING free f, fence.lease l
			WHERE k.lease = f.lease AND k.key = f.key AND l.lease = k.lease AND k.token <= l.token`, lease, mostTrimmed)
		if err != nil || trimmed.RowsAffected() < mostTrimmed {
			return err
		}
	}
}

// Enter shares the lock of a key for one call.
func (l *Ledger) Enter(ctx context.Context, id ledger.ID, token fence.Token, lost func()) (recorded fence.Token, leave func(), err error) {
	c, err := l.acquire(ctx)
	if err != nil {
		return 0, nil, fmt.Errorf("enter a call of [%s]: %w", id.Lease, err)
	}
	for {
		var entered bool
		if recorded, entered, err = share(ctx, c.Conn(), id, token); err != nil || entered {
			break
		}
		if recorded <= token {
			recorded, err = l.settle(ctx, c.Conn(), id, token)
		}
		if err != nil || recorded > token {
			break
		}
	}
	if err != nil {
		discard(ctx, c)
		return 0, nil, fmt.Errorf("enter a call of [%s]: %w", id.Lease, err)
	}
	if recorded > token {
		c.Release()
		return recorded, func() {}, nil
	}
	listening, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if ended(listening, c.Conn(), id, token) {
			lost()
		}
	}()
	return recorded, func() {
		stop()
		<-done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
		defer cancel()
		if _, err := c.Exec(ctx, "SELECT pg_catalog.pg_advisory_unlock_shared("+callLock+")", id.Lease, id.Key); err != nil {
			discard(ctx, c)
			return
		}
		c.Release()
	}, nil
}

// discard closes a session, and so gives up its locks.
func discard(ctx context.Context, c *pgxpool.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
	defer cancel()
	_ = c.Hijack().Close(ctx) // it is broken, or is now
}

// share takes the lock of the key's calls without waiting, in one round trip
// with a look at the record, and keeps it where token is that of the row.
func share(ctx context.Context, c *pgx.Conn, id ledger.ID, token fence.Token) (recorded fence.Token, entered bool, err error) {
	var locked bool
	var lease, key fence.Token
	batch := &pgx.Batch{}
	batch.Queue("SELECT pg_catalog.pg_try_advisory_lock_shared("+callLock+")", id.Lease, id.Key).QueryRow(func(r pgx.Row) error { return r.Scan(&locked) })
	batch.Queue(selectRecorded, id.Lease, id.Key).QueryRow(func(r pgx.Row) error { return r.Scan(&lease, &key) })
	if err := c.SendBatch(ctx, batch).Close(); err != nil {
		return 0, false, err
	}
	recorded = max(lease, key)
	if locked && recorded == token && key == token {
		return recorded, true, nil
	}
	if locked {
		_, err = c.Exec(ctx, "SELECT pg_catalog.pg_advisory_unlock_shared("+callLock+")", id.Lease, id.Key)
	}
	return recorded, false, err
}

// ended waits until a newer token asks for the end of the call, or the session
// has ended; false where the call was over before.
func ended(ctx context.Context, c *pgx.Conn, id ledger.ID, token fence.Token) bool {
	for {
		n, err := c.WaitForNotification(ctx)
		if err != nil {
			return ctx.Err() == nil
		}
		newer, of, _ := strings.Cut(n.Payload, " ")
		if t, err := fence.ParseToken(newer); err == nil && t > token && of == id.Lease+" "+id.Key {
			return true
		}
	}
}

// Begin notes a call that is about to leave.
func (l *Ledger) Begin(ctx context.Context, id ledger.CallID, attempt ledger.Attempt) (*ledger.Outcome, error) {
	o, err := l.begin(ctx, id, attempt)
	if err != nil {
		return nil, fmt.Errorf("note a call of [%s]: %w", id.Lease, err)
	}
	return o, nil
}

func (l *Ledger) begin(ctx context.Context, id ledger.CallID, attempt ledger.Attempt) (*ledger.Outcome, error) {
	if _, err := l.questions.Exec(ctx, `DELETE FROM fence.call_outcome WHERE (lease, key, idempotency_key) IN
		(SELECT lease, key, idempotency_key FROM fence.call_outcome WHERE expires < pg_catalog.now() ORDER BY expires LIMIT 16 FOR UPDATE SKIP LOCKED)`); err != nil {
		return nil, err
	}
	digest := attempt.Digest
	if digest == nil {
		digest = []byte{}
	}
	for {
		inserted, err := l.questions.Exec(ctx, `INSERT INTO fence.call_outcome (lease, key, idempotency_key, token, digest, expires)
			VALUES ($1, $2, $3, $4, $5, pg_catalog.now() + $6) ON CONFLICT DO NOTHING`,
			id.Lease, id.Key, id.IdempotencyKey, int64(attempt.Token), digest, l.options.Keep)
		if err != nil || inserted.RowsAffected() == 1 {
			return nil, err
		}
		known := &ledger.Outcome{}
		var answer []byte
		err = l.questions.QueryRow(ctx, "SELECT token, digest, answer FROM fence.call_outcome WHERE lease = $1 AND key = $2 AND idempotency_key = $3",
			id.Lease, id.Key, id.IdempotencyKey).Scan(&known.Token, &known.Digest, &answer)
		if errors.Is(err, pgx.ErrNoRows) {
			continue // it has just expired, or was forgotten
		}
		if err == nil && answer != nil {
			err = json.Unmarshal(answer, &known.Answer)
		}
		return known, err
	}
}

// Finish records the answer of a call.
func (l *Ledger) Finish(ctx context.Context, id ledger.CallID, answer ledger.Answer) error {
	text, err := json.Marshal(answer)
	if err == nil {
		_, err = l.questions.Exec(ctx, "UPDATE fence.call_outcome SET answer = $4 WHERE lease = $1 AND key = $2 AND idempotency_key = $3",
			id.Lease, id.Key, id.IdempotencyKey, text)
	}
	if err != nil {
		return fmt.Errorf("record the outcome of a call of [%s]: %w", id.Lease, err)
	}
	return nil
}

// Forget drops a call of which nothing was sent.
func (l *Ledger) Forget(ctx context.Context, id ledger.CallID) error {
	_, err := l.questions.Exec(ctx, "DELETE FROM fence.call_outcome WHERE lease = $1 AND key = $2 AND idempotency_key = $3", id.Lease, id.Key, id.IdempotencyKey)
	if err != nil {
		return fmt.Errorf("forget a call of [%s]: %w", id.Lease, err)
	}
	return nil
}

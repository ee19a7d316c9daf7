package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"os"

	"k8s.io/klog/v2"

	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// HeaderOutcome marks an answer that is recorded, not new.
const HeaderOutcome = "Fencing-Outcome"

// Values of HeaderOutcome.
const (
	outcomeRecorded    = "recorded"
	outcomeWithoutBody = "recorded-without-body"
)

const (
	// mostDigested bounds the body of a call with an idempotency key: it is
	// read whole before the call leaves, to tell one request from another.
	mostDigested = 1 << 20
	// mostRecorded bounds the recorded body of an answer.
	mostRecorded = 64 << 10
)

// recordedHeaders are the headers of an answer that are recorded.
var recordedHeaders = []string{"Content-Type", "Content-Encoding", "Content-Language", "Location"}

// digestOf reads the body of a call and tells what request it is.
func digestOf(r *http.Request) ([]byte, *Problem) {
	body, err := io.ReadAll(io.LimitReader(r.Body, mostDigested+1))
	if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, bodyTooLarge(large.Limit)
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, problemf(http.StatusBadRequest, MalformedRequest, "the body did not come whole: %v; nothing was sent", errTimeout)
	} else if err != nil {
		return nil, problemf(http.StatusBadRequest, MalformedRequest, "the body could not be read: %v", err)
	}
	if len(body) > mostDigested {
		return nil, problemf(http.StatusRequestEntityTooLarge, BodyTooLarge, "the body of a call with an %s is longer than %d bytes", HeaderIdempotencyKey, mostDigested)
	}
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	sum := sha256.New()
	for _, part := range []string{r.Method, r.URL.RequestURI(), r.Header.Get("Content-Type")} {
		sum.Write([]byte(part))
		sum.Write([]byte{0})
	}
	sum.Write(body)
	return sum.Sum(nil), nil
}

// begin notes that a call is about to leave. Done means that it must not: it
// was answered from what is known of it.
func (p *Proxy) begin(ctx context.Context, w http.ResponseWriter, c *passage, digest []byte, refuse func(*Problem)) (done bool) {
	known, err := p.gate.Ledger.Begin(ctx, c.callID(), ledger.Attempt{Token: c.token, Digest: digest})
	switch {
	case err != nil:
		refuse(undecided(err))
	case known == nil:
		return false
	case !bytes.Equal(known.Digest, digest):
		refuse(problemf(http.StatusUnprocessableEntity, AnotherRequest,
			"[%s] %s %.64q stands for another request; use a new one", c.id.Lease, HeaderIdempotencyKey, c.idempotencyKey))
	case known.Answer == nil:
		refuse(problemf(http.StatusBadGateway, OutcomeUnknown,
			"[%s] the call with %s %.64q was sent under token %s and has no answer yet; if it is still on its way the same key brings its outcome later; if not it may have taken effect, so ask the partner before it is repeated under a new key",
			c.id.Lease, HeaderIdempotencyKey, c.idempotencyKey, known.Token))
	default:
		p.observer.decided(surfaceProxy, nil, 0)
		c.status, c.reason = known.Answer.Status, outcomeRecorded
		for name, values := range known.Answer.Header {
			for _, value := range values {
				w.Header().Add(name, string(value))
			}
		}
		w.Header().Set(HeaderOutcome, outcomeRecorded)
		if known.Answer.BodyOmitted {
			w.Header().Set(HeaderOutcome, outcomeWithoutBody)
		}
		w.WriteHeader(known.Answer.Status)
		_, _ = w.Write(known.Answer.Body) // the caller is gone: it asks again
	}
	return true
}

// record records the answer of a call as it goes by.
func (p *Proxy) record(r *http.Response, c *passage) {
	answer := ledger.Answer{Status: r.StatusCode, Header: map[string][][]byte{}}
	for _, name := range recordedHeaders {
		for _, value := range r.Header[name] {
			answer.Header[name] = append(answer.Header[name], []byte(value))
		}
	}
	ctx := r.Request.Context()
	r.Body = &recorder{ReadCloser: r.Body, finish: func(body []byte, whole bool) {
		answer.Body, answer.BodyOmitted = body, !whole
		ctx, cancel := settle(ctx)
		defer cancel()
		if err := p.gate.Ledger.Finish(ctx, c.callID(), answer); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to record an outcome: it stays unknown")
		}
	}}
}

func (p *Proxy) forget(ctx context.Context, c *passage) {
	ctx, cancel := settle(ctx)
	defer cancel()
	if err := p.gate.Ledger.Forget(ctx, c.callID()); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to forget a call that was not sent: its outcome stays unknown")
	}
}

// recorder keeps the beginning of a body, and finishes before the reader sees
// its end.
type recorder struct {
	io.ReadCloser

	body           []byte
	over, finished bool
	finish         func(body []byte, whole bool)
}

// Read reads on, and finishes at the end.
func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if r.over = r.over || len(r.body)+n > mostRecorded; r.over {
		r.body = nil
	} else {
		r.body = append(r.body, p[:n]...)
	}
	if err == io.EOF {
		r.end(!r.over)
	}
	return n, err
}

// Close reads on to the end first, as far as that is kept: whoever repeats the
// call has to get the outcome, though its caller took a part of it. Without an
// end the body is not kept; the status is known all the same.
func (r *recorder) Close() error {
	if !r.finished && !r.over {
		_, _ = io.CopyN(io.Discard, r, int64(mostRecorded+1-len(r.body))) // what fails here has no end
	}
	r.end(false)
	return r.ReadCloser.Close()
}

// end finishes, once.
func (r *recorder) end(whole bool) {
	if r.finished {
		return
	}
	r.finished = true
	if !whole {
		r.body = nil
	}
	r.finish(r.body, whole)
}

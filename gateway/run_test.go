package gateway

import (
	"net/http"
	"path/filepath"
	"runtime/debug"
	"testing"

	"github.com/fencedlease/fencedlease/fence"
)

// TestProxy: a stale call never reaches the partner, nor does one that does
// not say what it presents; and none does after the gateway was restarted.
func TestProxy(t *testing.T) {
	p := newPartner(t, nil)
	file := filepath.Join(t.TempDir(), "ledger")
	inFile := func(o *Options) { o.LedgerFile = file }
	g := start(t, p.URL, inFile)
	for _, c := range []struct {
		name    string
		header  http.Header
		want    int
		reason  fence.Reason
		arrives bool
	}{
		{"a first token", stamped("41"), http.StatusOK, "", true},
		{"a newer one", stamped("42"), http.StatusOK, "", true},
		{"the same again", stamped("42"), http.StatusOK, "", true},
		{"a stale one", stamped("41"), http.StatusForbidden, fence.StaleToken, false},
		{"another key of the lease", stamped("41", fence.HeaderKey, "other"), http.StatusOK, "", true},
		{"the lease as the key", stamped("41", fence.HeaderKey, lease), http.StatusForbidden, fence.StaleToken, false},
		{"another lease", http.Header{fence.HeaderLease: {"shop/other"}, fence.HeaderToken: {"7"}}, http.StatusOK, "", true},
	} {
		got := g.call(t, http.MethodPost, "/capture", "", c.header)
		if arrived := len(p.calls()) > 0; got.status != c.want || got.reason != c.reason || arrived != c.arrives {
			t.Errorf("%s: %d %s, arrived %t; want %d %s, %t", c.name, got.status, got.reason, arrived, c.want, c.reason, c.arrives)
		}
	}
	if err := g.stop(); err != nil {
		t.Fatal(err)
	}
	g = start(t, p.URL, inFile)
	if got := g.call(t, http.MethodPost, "/capture", "", stamped("41")); got.reason != fence.StaleToken {
		t.Errorf("after a restart a stale token gets %+v", got)
	}
	sameTokens(t, p)
}

func TestCollectLess(t *testing.T) {
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	for _, c := range []struct {
		environment string
		want        int
	}{{"", 400}, {"50", 100}, {"off", 100}} { // the runtime reads it by itself, at start
		t.Setenv("GOGC", c.environment)
		CollectLess()
		if got := debug.SetGCPercent(100); got != c.want {
			t.Errorf("GOGC=%q: %d %%, want %d", c.environment, got, c.want)
		}
	}
}

package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// TestMain: the story's processes are this program again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		os.Exit(run())
	}
	os.Exit(m.Run())
}

func TestDemo(t *testing.T) {
	var out bytes.Buffer
	if err := play(t.Context(), &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Log(out.String())
	for _, want := range []string{
		"worker A  captures order-7 with token 41: 403 StaleToken: [shop/payments] token 41 is stale; recorded 42;",
		"logged order-6 41, order-7 42: each order once",
		"logged order-6 41, order-7 42, order-7 41: order-7 was captured TWICE",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, out.String())
		}
	}
}

// TestDemoFails: a gateway that does not fence is found out.
func TestDemoFails(t *testing.T) {
	bank, err := startServer(t.Context(), "partner")
	if err != nil {
		t.Fatal(err)
	}
	defer bank.kill()
	var out bytes.Buffer
	if err := story(t.Context(), &out, "no fence", bank, bank.address, true); err == nil || !strings.Contains(err.Error(), "the story says") {
		t.Errorf("got %v:\n%s", err, out.String())
	}
}

package fencecli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// TestTokenSpellings: a token is taken in its canonical form alone, from a flag,
// from the environment and from a file, whose last line may end.
func TestTokenSpellings(t *testing.T) {
	c := &cli{config: genericclioptions.NewConfigFlags(true)}
	for text, good := range map[string]bool{
		"42": true, "9007199254740991": true,
		" 42": false, "42 ": false, "+42": false, "-1": false, "0": false, "042": false, "0x2a": false, "4_2": false, "42.0": false, "4e1": false,
		"٤٢": false, "４２": false, "42\n\n": false, "9007199254740992": false, "1234567890123456789": false, "12345678901234567890": false,
		strings.Repeat("9", 10<<20): false,
	} {
		file := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		given := map[string]stampFlags{"flag": {text: text}, "file": {file: file}, "variable": {}}
		if len(text) < 1<<16 { // longer ones do not fit
			t.Setenv(envToken, text)
		} else {
			delete(given, "variable")
		}
		for from, f := range given {
			f.lease = "shop/main"
			err := f.complete(c)
			var usage usageError
			switch {
			case good && (err != nil || f.token.String() != text):
				t.Errorf("%s %q: token %s, %v", from, text, f.token, err)
			case !good && (!errors.As(err, &usage) || f.token != 0):
				t.Errorf("%s %.40q: token %s, %v", from, text, f.token, err)
			case err != nil && len(err.Error()) > 200:
				t.Errorf("%s %.40q: the error is %d bytes long", from, text, len(err.Error()))
			}
		}
	}
}

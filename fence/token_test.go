package fence

import (
	"errors"
	"strconv"
	"strings"
	"testing"
)

// malformedTokens are spellings that lenient number readers accept.
var malformedTokens = []string{
	"", " 42", "42 ", "+42", "-1", "0", "042", "0x2a", "4_2", "42.0", "4e1", "٤٢", "４２", "4\x002", "42\n", "\t42",
	"1234567890123456789", "12345678901234567890", "9007199254740992", "none", strings.Repeat("9", 10<<20),
}

func TestParseTokenRejectsWhatIsNotCanonical(t *testing.T) {
	for _, s := range malformedTokens {
		token, err := ParseToken(s)
		if !errors.Is(err, ErrMalformed) || token != 0 {
			t.Errorf("ParseToken(%s) = %d, %v; want ErrMalformed", quote(s), token, err)
		}
		if err != nil && len(err.Error()) > 200 {
			t.Errorf("the error for %s is %d bytes long", quote(s), len(err.Error()))
		}
	}
}

func TestParseTokenAcceptsTheBounds(t *testing.T) {
	for s, want := range map[string]Token{"1": 1, "42": 42, "2147483648": 1 << 31, "9007199254740991": MaxToken} {
		if got, err := ParseToken(s); got != want || err != nil {
			t.Errorf("ParseToken(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
}

func TestRecorded(t *testing.T) {
	cases := map[string]struct {
		annotations map[string]string
		want        Token
	}{
		"no annotations":               {nil, 0},
		"the token alone":              {map[string]string{AnnotationToken: "41"}, 41},
		"a seal above the token":       {map[string]string{AnnotationToken: "41", AnnotationFloor: "42"}, 42},
		"a seal below the token":       {map[string]string{AnnotationToken: "43", AnnotationFloor: "42"}, 43},
		"a malformed token is none":    {map[string]string{AnnotationToken: "042"}, 0},
		"a malformed floor is none":    {map[string]string{AnnotationToken: "7", AnnotationFloor: "1e9"}, 7},
		"other annotations say naught": {map[string]string{AnnotationLastToken: "9"}, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if got := Recorded(c.annotations); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func FuzzParseToken(f *testing.F) {
	for _, s := range malformedTokens[:len(malformedTokens)-1] {
		f.Add(s)
	}
	f.Add("42")
	f.Fuzz(func(t *testing.T, s string) {
		token, err := ParseToken(s)
		if err != nil {
			if !errors.Is(err, ErrMalformed) || token != 0 {
				t.Fatalf("ParseToken(%q) = %d, %v", s, token, err)
			}
			return
		}
		if strconv.FormatInt(int64(token), 10) != s || !token.Valid() {
			t.Fatalf("ParseToken(%q) = %d: not the same text, or out of range", s, token)
		}
	})
}

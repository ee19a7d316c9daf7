package policy

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fencedlease/fencedlease/fence"
)

// quote gives a CEL string literal.
func quote(s string) string { return strconv.Quote(s) }

// list gives a CEL list of string literals.
func list(values []string) string {
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = quote(v)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// all and anyOf join conditions.
func all(conditions ...string) string   { return "(" + strings.Join(conditions, " && ") + ")" }
func anyOf(conditions ...string) string { return "(" + strings.Join(conditions, " || ") + ")" }

// label and annotation give an optional value of an object's metadata; object
// is "object" or "oldObject", or anything else that has metadata.
func label(object, name string) string {
	return fmt.Sprintf("%s.metadata.?labels[?%s]", object, quote(name))
}

func annotation(object, name string) string {
	return fmt.Sprintf("%s.metadata.?annotations[?%s]", object, quote(name))
}

// same tells that an optional value is the same in the old and the new object.
func same(value func(object, name string) string, names ...string) string {
	conditions := make([]string, len(names))
	for i, name := range names {
		conditions[i] = value("object", name) + " == " + value("oldObject", name)
	}
	return all(conditions...)
}

// brings tells that the new object has one of the optional values.
func brings(value func(object, name string) string, names ...string) string {
	conditions := make([]string, len(names))
	for i, name := range names {
		conditions[i] = value("object", name) + ".hasValue()"
	}
	return anyOf(conditions...)
}

// extra gives the values of a userInfo extra key, an empty list without it.
func extra(name string) string {
	return fmt.Sprintf("request.userInfo.?extra[?%s].orValue([])", quote(name))
}

// isToken tells that a string is the canonical form of a token, as
// fence.ParseToken does.
func isToken(s string) string {
	return fmt.Sprintf("(%s.matches('^[1-9][0-9]{0,15}$') && int(%s) <= %d)", s, s, fence.MaxToken)
}

// tokenOr0 reads a string as a token; anything malformed counts as none.
func tokenOr0(s string) string { return fmt.Sprintf("(%s ? int(%s) : 0)", isToken(s), s) }

// tokenText shows a token as fence.Token.String does.
func tokenText(n string) string { return fmt.Sprintf("(%s == 0 ? 'none' : string(%s))", n, n) }

// exempt tells that the request comes from a principal that the fence never
// judges.
func exempt(o Options) string {
	conditions := []string{"request.userInfo.username in " + list(o.ExemptUsers)}
	for _, group := range o.ExemptGroups {
		conditions = append(conditions, quote(group)+" in request.userInfo.?groups.orValue([])")
	}
	return anyOf(conditions...)
}

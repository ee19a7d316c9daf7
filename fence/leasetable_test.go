package fence

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestTableLines(t *testing.T) {
	leases := []TableLease{
		{Namespace: "shop", Name: "main", Lease: Lease{Current: 42, Min: 7, Held: true, Holder: "pod-b", HolderUser: "bob"}},
		{Namespace: "cart", Name: "free"},
		{Namespace: "shop", Name: "bound", UnstampedAllowed: true, AllowedNamespaces: []string{"a", "b"},
			Lease: Lease{Current: 42, Min: 50, Held: true, Holder: "c\td", HolderUser: "bob\tsmith", HolderPodUID: "p1", BindUser: true, DenyLapsed: true, HeaderOnly: true}},
	}
	got, leftOut := PackTable(leases, 1000, 0)
	want := map[string]string{
		"_seen": "1000",
		// What revokes nothing and an account that binds nothing are left out.
		"shop": "\nmain\t42\t0\tx\theld by \"pod-b\"\t\t\t\n" +
			"bound\t42\t50\tbhlxu\theld by \"c\\td\"\tp1\t a b \t\"bob\\tsmith\"\n",
		"cart": "\nfree\t0\t0\t\theld by nobody\t\t\t\n",
	}
	if diff := cmp.Diff(want, got); diff != "" || leftOut != 0 {
		t.Errorf("%d left out; table (-want +got):\n%s", leftOut, diff)
	}
}

func TestTableIsBounded(t *testing.T) {
	var leases []TableLease
	for i := range 30_000 {
		leases = append(leases, TableLease{Namespace: fmt.Sprintf("ns-%d", i%7), Name: fmt.Sprintf("lease-%05d", i), Lease: Lease{Current: 42}})
	}
	data, leftOut := PackTable(leases, 1<<60, 0)
	size := 0
	for key, value := range data {
		size += len(key) + len(value)
	}
	if size > TableMaxBytes || size < TableMaxBytes-100 {
		t.Errorf("%d bytes, want at most %d, and no room for one more", size, TableMaxBytes)
	}
	if want := fmt.Sprint(leftOut); leftOut == 0 || data[TableLeftOut] != want {
		t.Errorf("the table says that it left out %q, want %s", data[TableLeftOut], want)
	}
	for i, l := range leases {
		if _, found, _ := LookupTable(data, l.Namespace, l.Name, 1); found != (i < len(leases)-leftOut) {
			t.Fatalf("lease %d of %d, %d left out: found %t; the last ones are to be left out", i, len(leases), leftOut, found)
		}
	}
}

func TestLookupTable(t *testing.T) {
	data, _ := PackTable([]TableLease{{Namespace: "shop", Name: "main-2", Lease: Lease{Current: 42}}}, 1000, 0)
	ahead, _ := PackTable(nil, 1000, 2000)
	tests := map[string]struct {
		namespace, name string
		token           Token
		data            map[string]string
		found, newer    bool
	}{
		"a token up to what ran ahead":               {namespace: "shop", name: "new", token: 2000, data: ahead},
		"a token above what ran ahead":               {namespace: "shop", name: "new", token: 2001, data: ahead, newer: true},
		"a lease that is there":                      {namespace: "shop", name: "main-2", data: data, found: true},
		"the beginning of a name is another lease":   {namespace: "shop", name: "main", token: 1000, data: data},
		"the end of a name is another lease":         {namespace: "shop", name: "2", token: 1000, data: data},
		"another namespace":                          {namespace: "cart", name: "main-2", token: 1000, data: data},
		"a token above what the table has seen":      {namespace: "shop", name: "new", token: 1001, data: data, newer: true},
		"an empty table knows nothing":               {namespace: "shop", name: "main-2", token: 1, newer: true},
		"a line that is cut short is no lease":       {namespace: "shop", name: "a", data: map[string]string{"shop": "\na\t42\t0\n"}},
		"a line without numbers is no lease":         {namespace: "shop", name: "a", data: map[string]string{"shop": "\na\tx\ty\t\t\t\t\t\n"}},
		"a namespace named as the table's own keys":  {namespace: "_seen", name: "1000", token: 1, data: data},
		"a revision that is no number knows nothing": {namespace: "shop", name: "a", token: 1, data: map[string]string{TableSeen: "x"}, newer: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, found, newer := LookupTable(test.data, test.namespace, test.name, test.token)
			if found != test.found || newer != test.newer {
				t.Errorf("found %t, newer %t; want %t, %t", found, newer, test.found, test.newer)
			}
		})
	}
}

// TestTableKeepsWhatJudgeNeeds: the rule says the same of a lease that went
// through the table, whatever texts people put into it.
func TestTableKeepsWhatJudgeNeeds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.SampledFrom([]string{"", "bob", "bob smith", "\t", "a\nmain\t99\t0\tx\t", `"`}), rapid.String())
		small := rapid.Map(rapid.IntRange(0, 5), func(i int) Token { return Token(i) })
		lease := Lease{
			Name: "shop/main", Found: true, Current: small.Draw(t, "current"), Min: small.Draw(t, "min"),
			Held: rapid.Bool().Draw(t, "held"), Holder: text.Draw(t, "holder"), HolderUser: text.Draw(t, "user"),
			BindUser: rapid.Bool().Draw(t, "bind"), DenyLapsed: rapid.Bool().Draw(t, "lapsed"), HeaderOnly: rapid.Bool().Draw(t, "header"),
		}
		before := TableLease{Namespace: "shop", Name: "before", Lease: Lease{Held: true, Holder: text.Draw(t, "other"), BindUser: true, HolderUser: text.Draw(t, "otherUser")}}
		data, _ := PackTable([]TableLease{before, {Namespace: "shop", Name: "main", Lease: lease}}, 1, 0)
		got, found, _ := LookupTable(data, "shop", "main", 1)
		if !found || strings.Count(data["shop"], "\n") != 3 {
			t.Fatalf("a text breaks the table's lines: %q", data["shop"])
		}
		got.Lease.Holder = lease.Holder
		presented := Presented{Stamped: true, Text: small.Draw(t, "presented").String(), ByHeader: rapid.Bool().Draw(t, "byHeader"), User: text.Draw(t, "sender")}
		if strings.ContainsAny(lease.HolderUser, "\t\n") {
			presented.User = lease.HolderUser // refused, as the table cannot hold it
			if v := Judge(presented, 0, got.Lease, Policy{}); lease.BindUser && lease.Held && v.Outcome == Allowed {
				t.Errorf("an account that the table cannot hold passes: %+v", v)
			}
			return
		}
		if want, got := Judge(presented, 0, lease, Policy{}), Judge(presented, 0, got.Lease, Policy{}); want != got {
			t.Errorf("judged %+v, through the table %+v", want, got)
		}
	})
}

func TestTableTokens(t *testing.T) {
	data, _ := PackTable([]TableLease{
		{Namespace: "shop", Name: "main", Lease: Lease{Current: 42, Min: 50, Held: true, Holder: "a\tb\nc"}},
		{Namespace: "shop", Name: "new"},
		{Namespace: "cart", Name: "main", Lease: Lease{Current: 7}, AllowedNamespaces: []string{"*"}},
	}, 1000, 2000)
	if diff := cmp.Diff(map[string]Token{"shop/main": 42, "cart/main": 7}, TableTokens(data)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := TableTokens(map[string]string{"shop": "\na\n\nb\tx\t\nc\t-1\t0\n", "_seen": "1000"}); len(got) > 0 {
		t.Errorf("what is no table gives %v", got)
	}
}

package fence

import (
	"fmt"
	"strconv"
	"strings"
)

// The lease table tells the admission policies what they need to know of
// every lease. It is the data of one ConfigMap, packed so that CEL finds one
// lease among thousands with two splits:
//
//	_seen       the store's revision up to which the table is complete
//	_ahead      the highest token that was issued above _seen; absent where none was
//	_left-out   how many leases did not fit; absent where all did
//	<namespace> the leases of that namespace: a line feed, then one line each
//
// A line holds these fields, with a tab between them:
//
//	name  current  floor  flags  holder  pod  allowed  user
//
// current is the newest token issued, 0 if none; floor the lowest token that
// is not revoked, 0 where it revokes nothing; flags the letters below; holder
// "held by ..." as messages say it; pod and user the account that the lease
// binds its token to; allowed the namespaces, each between blanks, whose
// objects may name the lease besides those of its own, "*" for all.
//
// A token is never lower than the revision at which its lease was created, nor
// than any that was issued ahead of the revisions before. So a lease that the
// table does not hold is gone (or did not fit) where its token is not above
// _seen and _ahead. Above them it may be newer than the table; so may be a token
// above current, which is no word on whether it was issued.
const (
	// TableName is the name of the ConfigMap, in the operator's namespace.
	TableName = "fencedlease-table"
	// TableSeen, TableAhead and TableLeftOut are the keys that are no namespaces.
	TableSeen    = "_seen"
	TableAhead   = "_ahead"
	TableLeftOut = "_left-out"
	// TableMaxBytes bounds keys and values together, below the 1 MiB that a
	// ConfigMap may hold.
	TableMaxBytes = 1_000_000
)

// Flags of a line.
const (
	// TableBound: a stamped write counts only from the holder's account.
	TableBound = "b"
	// TableHeaderOnly: a token presented by annotations does not count.
	TableHeaderOnly = "h"
	// TableDenyLapsed: the current token does not count while nobody holds.
	TableDenyLapsed = "l"
	// TableHeld: somebody holds the lease.
	TableHeld = "x"
	// TableUnstampedAllowed: writes that present no token pass or warn,
	// whoever sends them.
	TableUnstampedAllowed = "u"
)

// Places of the fields in a line, its name taken off.
const (
	TableFieldCurrent = iota
	TableFieldFloor
	TableFieldFlags
	TableFieldHolder
	TableFieldPod
	TableFieldAllowed
	TableFieldUser
	tableFields
)

// TableLease is a lease as the table holds it.
type TableLease struct {
	// Namespace and Name are the lease's own.
	Namespace, Name string
	// Lease is what is known of it. Its Name is not used.
	Lease Lease
	// AllowedNamespaces are the namespaces, besides its own, whose objects
	// may name it as their guard; "*" is every one.
	AllowedNamespaces []string
	// UnstampedAllowed tells that unstamped writes pass, whoever sends them.
	UnstampedAllowed bool
}

// PackTable gives the table's data. Leases that would exceed TableMaxBytes are
// left out, the last ones first, and counted: give the oldest first. seen is
// the store's revision up to which leases is complete, ahead the highest token
// that was issued above it, 0 for none.
func PackTable(leases []TableLease, seen int64, ahead Token) (data map[string]string, leftOut int) {
	packed := map[string]*strings.Builder{}
	size := len(TableSeen) + len(TableAhead) + len(TableLeftOut) + 3*20
	for _, l := range leases {
		line := tableLine(l)
		more := len(line)
		if packed[l.Namespace] == nil {
			more += len(l.Namespace) + 1
		}
		if size+more > TableMaxBytes {
			leftOut++
			continue
		}
		size += more
		if packed[l.Namespace] == nil {
			packed[l.Namespace] = &strings.Builder{}
			packed[l.Namespace].WriteByte('\n')
		}
		packed[l.Namespace].WriteString(line)
	}
	data = make(map[string]string, len(packed)+2)
	for namespace, lines := range packed {
		data[namespace] = lines.String()
	}
	data[TableSeen] = strconv.FormatInt(seen, 10)
	if int64(ahead) > seen {
		data[TableAhead] = ahead.String()
	}
	if leftOut > 0 {
		data[TableLeftOut] = strconv.Itoa(leftOut)
	}
	return data, leftOut
}

func tableLine(l TableLease) string {
	var flags strings.Builder
	flag := func(set bool, letter string) {
		if set {
			flags.WriteString(letter)
		}
	}
	flag(l.Lease.BindUser, TableBound)
	flag(l.Lease.HeaderOnly, TableHeaderOnly)
	flag(l.Lease.DenyLapsed, TableDenyLapsed)
	flag(l.Lease.Held, TableHeld)
	flag(l.UnstampedAllowed, TableUnstampedAllowed)

	var floor Token
	if l.Lease.Min > l.Lease.Current {
		floor = l.Lease.Min
	}
	var user, pod string
	if l.Lease.BindUser && l.Lease.Held {
		user, pod = tableText(l.Lease.HolderUser), tableText(l.Lease.HolderPodUID)
	}
	allowed := ""
	if len(l.AllowedNamespaces) > 0 {
		allowed = " " + strings.Join(l.AllowedNamespaces, " ") + " "
	}
	return fmt.Sprintf("%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n",
		l.Name, l.Lease.Current, floor, flags.String(), heldBy(l.Lease), pod, allowed, user)
}

// tableText keeps a text from breaking a line. An account whose name holds a
// control character then equals no account that authenticates: it is rejected,
// never mistaken for another.
func tableText(s string) string {
	if strings.ContainsAny(s, "\t\n") {
		return strconv.QuoteToASCII(s)
	}
	return s
}

// TableTokens gives the newest token of every lease in the table's data, by
// "namespace/name".
func TableTokens(data map[string]string) map[string]Token {
	tokens := map[string]Token{}
	for namespace, lines := range data {
		for line := range strings.Lines(lines) {
			fields := strings.SplitN(line, "\t", TableFieldCurrent+3)
			if len(fields) < TableFieldCurrent+3 {
				continue // no lease's line
			}
			if token, err := ParseToken(fields[TableFieldCurrent+1]); err == nil {
				tokens[namespace+"/"+fields[0]] = token
			}
		}
	}
	return tokens
}

// LookupTable finds a lease in the table's data, as the policies do. Without
// one, newer tells whether a lease with this token may be newer than the table
// rather than gone. The Holder of the result is not restored.
func LookupTable(data map[string]string, namespace, name string, token Token) (lease TableLease, found, newer bool) {
	_, rest, found := strings.Cut(data[namespace], "\n"+name+"\t")
	if !found {
		seen, err := strconv.ParseInt(data[TableSeen], 10, 64)
		ahead, _ := ParseToken(data[TableAhead])
		return TableLease{}, false, err != nil || int64(token) > seen && token > ahead
	}
	line, _, _ := strings.Cut(rest, "\n")
	fields := strings.Split(line, "\t")
	if len(fields) != tableFields {
		return TableLease{}, false, false
	}
	flags := fields[TableFieldFlags]
	current, errCurrent := strconv.ParseInt(fields[TableFieldCurrent], 10, 64)
	floor, errFloor := strconv.ParseInt(fields[TableFieldFloor], 10, 64)
	if errCurrent != nil || errFloor != nil {
		return TableLease{}, false, false
	}
	return TableLease{
		Namespace: namespace, Name: name,
		Lease: Lease{
			Name: namespace + "/" + name, Found: true,
			Current: Token(current), Min: Token(floor),
			Held:       strings.Contains(flags, TableHeld),
			BindUser:   strings.Contains(flags, TableBound),
			HolderUser: fields[TableFieldUser], HolderPodUID: fields[TableFieldPod],
			DenyLapsed: strings.Contains(flags, TableDenyLapsed),
			HeaderOnly: strings.Contains(flags, TableHeaderOnly),
		},
		AllowedNamespaces: strings.Fields(fields[TableFieldAllowed]),
		UnstampedAllowed:  strings.Contains(flags, TableUnstampedAllowed),
	}, true, false
}

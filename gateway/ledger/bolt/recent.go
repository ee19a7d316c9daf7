package bolt

import (
	"sync"

	"k8s.io/utils/lru"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/gateway/ledger"
)

// mostRecent bounds how many keys are kept in memory.
const mostRecent = 4096

// recent is what was read of the keys in use: a holder who goes on writing
// costs no look into the file. Any change of a record empties it, before
// whoever made the change is told.
type recent struct {
	mu      sync.Mutex
	changes uint64
	tokens  *lru.Cache // ledger.ID -> fence.Token
}

func newRecent() *recent { return &recent{tokens: lru.New(mostRecent)} }

// get gives what is recorded for a key, if it is known, and for keep the
// number of changes that it was known after.
func (r *recent) get(id ledger.ID) (token fence.Token, changes uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.tokens.Get(id)
	token, _ = known.(fence.Token)
	return token, r.changes, ok
}

// keep remembers what was read, unless a change came between.
func (r *recent) keep(id ledger.ID, token fence.Token, changes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changes == changes {
		r.tokens.Add(id, token)
	}
}

// changed forgets all that was read so far.
func (r *recent) changed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changes++
	r.tokens.Clear()
}

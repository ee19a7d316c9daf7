// Command etcd is etcd's own main, built here because etcd does not publish
// it as an importable command of a tagged module.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}

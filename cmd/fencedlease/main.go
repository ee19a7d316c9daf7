// Command fencedlease is the operator, its development control plane and the
// generator of the SQL fence.
package main

import "os"

func main() { os.Exit(execute()) }

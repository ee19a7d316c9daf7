// Package config embeds the shipped manifests, so that the dev command and
// the tests install the very files that kubectl apply -k installs.
package config

import "embed"

// FS holds this folder.
//
//go:embed *
var FS embed.FS

package observability

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

// series are what a /metrics page holds: by name, the labels of each.
type series map[string][]map[string]string

var (
	sample = regexp.MustCompile(`(?m)^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? [^ ]+$`)
	pair   = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

func (s series) read(page string) {
	for _, m := range sample.FindAllStringSubmatch(page, -1) {
		labels := map[string]string{}
		for _, p := range pair.FindAllStringSubmatch(m[2], -1) {
			labels[p[1]] = p[2]
		}
		s[m[1]] = append(s[m[1]], labels)
	}
}

// selector is one metric of a query with what it demands of its labels.
type selector struct{ name, matchers string }

var (
	// A word with an underscore that no bracket follows is a metric: the
	// functions that we use with one take arguments.
	metric  = regexp.MustCompile(`([a-z]+_\w+)(\{[^}]*\})?([ (]*)`)
	matcher = regexp.MustCompile(`(\w+)(=~|!=|!~|=)"([^"]*)"`)
)

func selectors(expr string) (all []selector) {
	for _, m := range metric.FindAllStringSubmatch(expr, -1) {
		if !strings.HasPrefix(m[3], "(") {
			all = append(all, selector{m[1], m[2]})
		}
	}
	return all
}

// finds tells whether a series is there that the selector selects.
func (s series) finds(sel selector) bool {
	return slices.ContainsFunc(s[sel.name], func(labels map[string]string) bool {
		for _, m := range matcher.FindAllStringSubmatch(sel.matchers, -1) {
			value, ok := labels[m[1]]
			matches := value == m[3]
			if strings.HasSuffix(m[2], "~") {
				matches = regexp.MustCompile("^(?:" + m[3] + ")$").MatchString(value)
			}
			if !ok || matches == strings.HasPrefix(m[2], "!") {
				return false
			}
		}
		return true
	})
}

// labels are those of a metric, the bounds of histograms aside.
func (s series) labels(name string) []string {
	all := map[string]bool{}
	for _, labels := range append(s[name], s[name+"_count"]...) {
		for l := range labels {
			all[l] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Package main: copy this file into your service, with your package's name. Rate limits of Tidegate for net/http, and for
// callers of an API that is limited.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"sync"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	unit "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// --- The service: asks Tidegate before it answers ---

// Entry is a part of a descriptor, such as {"user", "ann"}.
type Entry struct{ Key, Value string }

// Limit is sent in place of the rule's limit.
type Limit struct {
	Requests uint32
	Unit     unit.RateLimitUnit
}

// Descriptor says what is limited. The order of the entries matters.
type Descriptor struct {
	Entries []Entry
	// Hits is the cost; nil: that of the request; 0 looks without spending.
	Hits  *uint64
	Limit *Limit
}

func (d Descriptor) proto() *ratelimit.RateLimitDescriptor {
	message := &ratelimit.RateLimitDescriptor{}
	for _, entry := range d.Entries {
		message.Entries = append(message.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: entry.Key, Value: entry.Value})
	}
	if d.Hits != nil {
		message.HitsAddend = wrapperspb.UInt64(*d.Hits)
	}
	if d.Limit != nil {
		message.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: d.Limit.Requests, Unit: d.Limit.Unit}
	}
	return message
}

func (d Descriptor) givenBack(hits uint64) *ratelimit.RateLimitDescriptor {
	message := d.proto()
	message.IsNegativeHits = true
	if d.Hits == nil {
		message.HitsAddend = wrapperspb.UInt64(hits)
	}
	return message
}

// Decision has the status 200 (go on), 429 (refused) or 503 (no answer in time, and the service fails closed).
type Decision struct {
	Status  int
	Headers []Entry
	Body    []byte
	// Err says why there was no answer.
	Err error
	// hits of the request, for descriptors without hits of their own.
	hits uint32
}

// Apply adds the headers to the response. If the request is not admitted, it sends the whole response and returns false.
func (d Decision) Apply(w http.ResponseWriter) bool {
	for _, field := range d.Headers {
		w.Header().Add(field.Key, field.Value)
	}
	if d.Status == http.StatusOK {
		return true
	}
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	}
	w.WriteHeader(d.Status)
	w.Write(d.Body)
	return false
}

// Tidegate is a connection that is opened once, kept, and shared by all requests.
type Tidegate struct {
	// Domain is that of the rules.
	Domain string
	// Timeout is the longest that a request waits for an answer.
	Timeout time.Duration
	// FailOpen lets requests go on without an answer; otherwise they get status 503.
	FailOpen bool
	// OnUndecided is called with the error of each call without a decision, for a metric of yours; nil: nothing is called. The log
	// has a warning of the first, and then at most every 10 s with the number of those in between.
	OnUndecided func(error)

	mutex      sync.Mutex
	quietUntil time.Time
	unlogged   int
	connection *grpc.ClientConn
	client     rls.RateLimitServiceClient
}

// TLS is an option of New for a Tidegate with TLS, from PEM files: its CA, and a client certificate with its key where Tidegate asks
// for one, or "".
func TLS(ca, certificate, key string) (grpc.DialOption, error) {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate in PEM", ca)
	}
	if certificate != "" {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config)), nil
}

// New starts to connect, with a timeout of 100 ms and failing open. Without the option TLS, the connection is not encrypted.
func New(address, domain string, options ...grpc.DialOption) (*Tidegate, error) {
	// Back within about a second after a restart, and a dead peer is noticed within 15 s.
	retries := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	defaults := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retries, MinConnectTimeout: time.Second}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	}
	connection, err := grpc.NewClient(address, append(defaults, options...)...)
	if err != nil {
		return nil, err
	}
	connection.Connect()
	client := rls.NewRateLimitServiceClient(connection)
	return &Tidegate{Domain: domain, Timeout: 100 * time.Millisecond, FailOpen: true, connection: connection, client: client}, nil
}

// Close ends the connection.
func (t *Tidegate) Close() error { return t.connection.Close() }

// Decide asks about a request, in a middleware or in a handler that has read the body. Without an answer, FailOpen decides, and
// Decision.Err says why. 0 hits mean 1.
func (t *Tidegate) Decide(ctx context.Context, hits uint32, descriptors ...Descriptor) Decision {
	if len(descriptors) == 0 {
		return Decision{Status: http.StatusOK}
	}
	request := &rls.RateLimitRequest{Domain: t.Domain, HitsAddend: hits}
	for _, descriptor := range descriptors {
		request.Descriptors = append(request.Descriptors, descriptor.proto())
	}
	answer, err := t.ask(ctx, request)
	switch {
	case err != nil && t.FailOpen:
		t.report(err, "the request goes on without a limit")
		return Decision{Status: http.StatusOK, Err: err}
	case err != nil:
		t.report(err, "the request gets status 503")
		body := []byte("The rate limiter is unavailable.\n")
		return Decision{Status: http.StatusServiceUnavailable, Headers: []Entry{{"Retry-After", "1"}}, Body: body, Err: err}
	}
	decision := Decision{Status: http.StatusOK, hits: max(hits, 1)}
	for _, header := range answer.GetResponseHeadersToAdd() {
		decision.Headers = append(decision.Headers, Entry{header.GetKey(), header.GetValue()})
	}
	if answer.GetOverallCode() == rls.RateLimitResponse_OVER_LIMIT {
		decision.Status, decision.Body = http.StatusTooManyRequests, answer.GetRawBody()
	}
	return decision
}

// GiveBack gives back the hits that an admitted request spent on these of its descriptors. Call it once for a decision at most.
//
// Nothing is given back where Tidegate refused or did not decide: those hits may not be counted. If this call is not answered, it is
// reported like a call without a decision, and not sent again: the hits stay counted.
func (t *Tidegate) GiveBack(ctx context.Context, decision Decision, descriptors ...Descriptor) {
	if decision.Status != http.StatusOK || decision.Err != nil || len(descriptors) == 0 {
		return
	}
	request := &rls.RateLimitRequest{Domain: t.Domain}
	for _, descriptor := range descriptors {
		request.Descriptors = append(request.Descriptors, descriptor.givenBack(uint64(decision.hits)))
	}
	if _, err := t.ask(ctx, request); err != nil {
		t.report(err, "hits are not given back")
	}
}

func (t *Tidegate) ask(ctx context.Context, request *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	return t.client.ShouldRateLimit(ctx, request)
}

// logPause is the time from one line about calls without a decision to the next.
const logPause = 10 * time.Second

func (t *Tidegate) report(err error, result string) {
	if t.OnUndecided != nil {
		t.OnUndecided(err)
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	now := time.Now()
	if now.Before(t.quietUntil) {
		t.unlogged++
		return
	}
	slog.Warn("Tidegate did not decide", "address", t.connection.Target(), "error", err, "result", result, "more since the last such line", t.unlogged)
	t.quietUntil, t.unlogged = now.Add(logPause), 0
}

// Limit is a middleware. It asks with the hits and descriptors that describe returns; without descriptors there is no limit.
func (t *Tidegate) Limit(describe func(*http.Request) (uint32, []Descriptor), next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hits, descriptors := describe(r)
		if t.Decide(r.Context(), hits, descriptors...).Apply(w) {
			next.ServeHTTP(w, r)
		}
	})
}

// --- The caller: what to do when an API refuses ---

const longestJitter = 10 * time.Second

// Retry calls send until its response is neither 429 nor 503, at most 5 times; it returns the last response.
//
// It waits as long as Retry-After says, and then a random time of at most as long again (at least 100 ms), twice that, and so on
// up to 10 s (full jitter), so that callers who were refused together do not return together. An error of send ends it.
func Retry(ctx context.Context, send func() (*http.Response, error)) (*http.Response, error) {
	const attempts, base = 5, 100 * time.Millisecond
	for attempt := 0; ; attempt++ {
		response, err := send()
		if err != nil || attempt == attempts-1 {
			return response, err
		}
		if response.StatusCode != http.StatusTooManyRequests && response.StatusCode != http.StatusServiceUnavailable {
			return response, nil
		}
		response.Body.Close()
		wait := retryAfter(response.Header)
		jitter := rand.N(min(longestJitter, min(longestJitter, max(base, wait))<<attempt))
		select {
		case <-time.After(wait + jitter):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// retryAfter returns 0 without the header, or if it is a date, which Tidegate does not send.
func retryAfter(header http.Header) time.Duration {
	seconds, err := strconv.ParseUint(header.Get("Retry-After"), 10, 31)
	if err != nil {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// Pacer keeps a caller below the limit that the responses report. Its zero value is ready.
//
// While no limit is known, one call is in flight; afterwards as many as the last response left, less those in flight. Without any
// left it waits until the reset, and a random time of at most as long again (10 s at most): others may wait for the same reset.
type Pacer struct {
	mutex     sync.Mutex
	isKnown   bool
	remaining int
	until     time.Time
	inFlight  int
	// changed is closed at an answer.
	changed chan struct{}
}

// Call waits for its turn and calls send.
func (p *Pacer) Call(ctx context.Context, send func() (*http.Response, error)) (*http.Response, error) {
	if err := p.enter(ctx); err != nil {
		return nil, err
	}
	response, err := send()
	var remaining int
	var reset time.Duration
	isReported := false
	if err == nil {
		remaining, reset, isReported = reportedLimit(response.Header)
	}
	p.leave(remaining, reset, isReported)
	return response, err
}

func (p *Pacer) enter(ctx context.Context) error {
	for {
		wait, changed := p.tryEnter()
		if changed == nil {
			return nil
		}
		select {
		case <-time.After(wait):
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tryEnter takes a call, or returns how long to wait, and a channel that is closed at an earlier change.
func (p *Pacer) tryEnter() (time.Duration, <-chan struct{}) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	if !time.Now().Before(p.until) {
		p.isKnown = false
	}
	switch {
	case !p.isKnown && p.inFlight > 0:
		return math.MaxInt64, p.changed
	case p.isKnown && p.remaining < 1:
		return time.Until(p.until), p.changed
	}
	p.remaining--
	p.inFlight++
	return 0, nil
}

func (p *Pacer) leave(remaining int, reset time.Duration, isReported bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.inFlight--
	if isReported {
		if remaining == 0 && reset > 0 {
			reset += rand.N(min(longestJitter, reset))
		}
		p.isKnown, p.remaining, p.until = true, remaining-p.inFlight, time.Now().Add(reset)
	} else if !p.isKnown {
		// Without a reported limit, calls are not held back for a second.
		p.isKnown, p.remaining, p.until = true, math.MaxInt, time.Now().Add(time.Second)
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

var item = regexp.MustCompile(`;r=(\d+);t=(\d+)`)

// reportedLimit returns the calls that remain, and the time until that changes; from RateLimit, RateLimit-* or X-RateLimit-*.
func reportedLimit(header http.Header) (remaining int, reset time.Duration, isReported bool) {
	if wait := retryAfter(header); wait > 0 {
		return 0, wait, true
	}
	// RateLimit: "per-user";r=1;t=46, "all";r=999;t=946. The least remaining counts, for the longest time.
	for _, found := range item.FindAllStringSubmatch(header.Get("RateLimit"), -1) {
		r, _ := strconv.Atoi(found[1])
		t, _ := strconv.Atoi(found[2])
		wait := time.Duration(t) * time.Second
		if !isReported || r < remaining || r == remaining && wait > reset {
			remaining, reset, isReported = r, wait, true
		}
	}
	if isReported {
		return
	}
	for _, prefix := range []string{"RateLimit", "X-RateLimit"} {
		r, wrong := strconv.Atoi(header.Get(prefix + "-Remaining"))
		seconds, wrongToo := strconv.ParseInt(header.Get(prefix+"-Reset"), 10, 33)
		if wrong != nil || wrongToo != nil {
			continue
		}
		if prefix == "X-RateLimit" {
			// A time in seconds of the epoch.
			return r, max(0, time.Until(time.Unix(seconds, 0))), true
		}
		return r, time.Duration(seconds) * time.Second, true
	}
	return 0, 0, false
}

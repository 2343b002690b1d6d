package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	unit "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
)

const usage = `A service with limits and its caller.

demo serve 127.0.0.1:8081 open 100         a service on a free port, with 100 ms for Tidegate; closed: fail closed
       ... open 100 CA [CERT KEY]          the same over TLS, with these PEM files
demo retry http://127.0.0.1:PORT/search    two calls; each is repeated while it is refused
demo pace http://127.0.0.1:PORT/feed       six calls, none too early

The callers print a line for each HTTP request: status, Retry-After, and when it began and ended in ms.
`

func main() {
	switch {
	case len(os.Args) >= 5 && os.Args[1] == "serve":
		timeout, err := strconv.Atoi(os.Args[4])
		if err != nil {
			log.Fatalf("the timeout %q is no number of milliseconds", os.Args[4])
		}
		log.Fatal(serve(os.Args[2], os.Args[3] == "open", time.Duration(timeout)*time.Millisecond, os.Args[5:]))
	case len(os.Args) == 3:
		call(os.Args[1], os.Args[2])
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
}

// describe limits each path for each user. An export costs 5; a trial costs 2 and brings a limit of its own.
func describe(r *http.Request) (uint32, []Descriptor) {
	user := r.Header.Get("X-User")
	if user == "" {
		user = "anonymous"
	}
	byPath := []Descriptor{{Entries: []Entry{{"path", r.URL.Path}, {"user", user}}}}
	switch r.URL.Path {
	case "/login", "/undecided":
		return 0, nil
	case "/export":
		return 5, byPath
	case "/trial":
		hits := uint64(2)
		return 1, []Descriptor{{[]Entry{{"trial", user}}, &hits, &Limit{4, unit.RateLimitUnit_DAY}}}
	}
	return 1, byPath
}

func serve(address string, failOpen bool, timeout time.Duration, files []string) error {
	var options []grpc.DialOption
	if len(files) > 0 {
		files = append(files, "", "")
		secured, err := TLS(files[0], files[1], files[2])
		if err != nil {
			return err
		}
		options = append(options, secured)
	}
	tidegate, err := New(address, "shop", options...)
	if err != nil {
		return err
	}
	defer tidegate.Close()
	tidegate.FailOpen, tidegate.Timeout = failOpen, timeout
	var undecided atomic.Int64
	tidegate.OnUndecided = func(error) { undecided.Add(1) }
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Printf("http://%s\n", listener.Addr())
	routes := http.NewServeMux()
	routes.HandleFunc("GET /undecided", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, undecided.Load()) })
	routes.HandleFunc("POST /login", func(w http.ResponseWriter, r *http.Request) { login(tidegate, w, r) })
	routes.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s: done\n", r.URL.Path) })
	return http.Serve(listener, tidegate.Limit(describe, routes))
}

// isRight is a stand-in for your lookup and its hash.
func isRight(account, password string) bool { return account != "" && password == "right" }

func login(tidegate *Tidegate, w http.ResponseWriter, r *http.Request) {
	name, password := r.PostFormValue("account"), r.PostFormValue("password")
	// Behind a proxy, the address that the proxy vouches for.
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	address := Descriptor{Entries: []Entry{{"path", "/login"}, {"remote_address", host}}}
	account := Descriptor{Entries: []Entry{{"path", "/login"}, {"account", name}}}
	decision := tidegate.Decide(r.Context(), 1, address, account)
	if decision.Err != nil {
		// Also where others fail open: without a decision, guesses would have no limit.
		w.Header().Set("Retry-After", "1")
		http.Error(w, "Try again later.", http.StatusServiceUnavailable)
		return
	}
	if !decision.Apply(w) {
		return
	}
	if !isRight(name, password) {
		http.Error(w, "Wrong account or password.", http.StatusUnauthorized)
		return
	}
	// The hit of the account only: whoever knows one password must not get more guesses at others from an address.
	tidegate.GiveBack(r.Context(), decision, account)
	fmt.Fprintln(w, "Welcome.")
}

func call(how, url string) {
	began := time.Now()
	send := func() (*http.Response, error) {
		start := time.Since(began)
		request, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			return nil, err
		}
		request.Header.Set("X-User", how)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return nil, err
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		after := response.Header.Get("Retry-After")
		if after == "" {
			after = "-"
		}
		fmt.Println(response.StatusCode, after, start.Milliseconds(), time.Since(began).Milliseconds())
		return response, nil
	}
	fail := func(_ *http.Response, err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	if how == "retry" {
		for range 2 {
			fail(Retry(context.Background(), send))
		}
		return
	}
	var pacer Pacer
	var calls sync.WaitGroup
	for range 6 {
		calls.Go(func() { fail(pacer.Call(context.Background(), send)) })
	}
	calls.Wait()
}

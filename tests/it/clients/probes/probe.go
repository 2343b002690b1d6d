// The probe of grpc-go: a client that a test steers. Its commands are in probe.py.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

const serviceConfig = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.05s",
	"maxBackoff": "0.1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`

var (
	clients  = map[string]rls.RateLimitServiceClient{}
	printing sync.Mutex
)

func number(word string) int {
	number, err := strconv.Atoi(word)
	if err != nil {
		log.Fatal(err)
	}
	return number
}

func milliseconds(word string) time.Duration { return time.Duration(number(word)) * time.Millisecond }

func open(name, target, ca, retries, keepaliveMs string) {
	backoffs := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	pings := keepalive.ClientParameters{Time: milliseconds(keepaliveMs), Timeout: 5 * time.Second, PermitWithoutStream: true}
	options := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffs, MinConnectTimeout: time.Second}),
		grpc.WithKeepaliveParams(pings),
	}
	if retries == "policy" || retries == "off" {
		options = append(options, grpc.WithDefaultServiceConfig(serviceConfig))
	}
	if retries == "off" {
		options = append(options, grpc.WithDisableRetry())
	}
	secured := insecure.NewCredentials()
	if ca != "-" {
		var err error
		if secured, err = credentials.NewClientTLSFromFile(ca, ""); err != nil {
			log.Fatal(err)
		}
	}
	connection, err := grpc.NewClient(target, append(options, grpc.WithTransportCredentials(secured))...)
	if err != nil {
		log.Fatal(err)
	}
	clients[name] = rls.NewRateLimitServiceClient(connection)
}

func call(id, name, key, value, timeoutMs, compression string) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), milliseconds(timeoutMs))
	defer cancel()
	var options []grpc.CallOption
	if compression == "gzip" {
		options = append(options, grpc.UseCompressor(gzip.Name))
	}
	entry := &ratelimit.RateLimitDescriptor_Entry{Key: key, Value: value}
	descriptor := &ratelimit.RateLimitDescriptor{Entries: []*ratelimit.RateLimitDescriptor_Entry{entry}}
	request := &rls.RateLimitRequest{Domain: "clients", Descriptors: []*ratelimit.RateLimitDescriptor{descriptor}}
	answer, err := clients[name].ShouldRateLimit(ctx, request, options...)
	printing.Lock()
	defer printing.Unlock()
	fmt.Printf(`{"id":%s,"status":%d,"code":%d,"ms":%d}`+"\n",
		id, status.Code(err), answer.GetOverallCode(), time.Since(began).Milliseconds())
	fmt.Fprintln(os.Stderr, id, err)
}

func main() {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if words[0] == "open" {
			open(words[1], words[2], words[3], words[4], words[5])
		} else {
			go call(words[1], words[2], words[3], words[4], words[5], words[6])
		}
	}
}

package tidegate;

import com.google.protobuf.UInt64Value;
import envoy.config.core.v3.Base.HeaderValue;
import envoy.extensions.common.ratelimit.v3.Ratelimit.RateLimitDescriptor;
import envoy.service.ratelimit.v3.Rls.RateLimitRequest;
import envoy.service.ratelimit.v3.Rls.RateLimitResponse;
import envoy.type.v3.RatelimitUnit.RateLimitUnit;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.stub.ClientCalls;
import jakarta.servlet.Filter;
import jakarta.servlet.FilterChain;
import jakarta.servlet.ServletException;
import jakarta.servlet.ServletRequest;
import jakarta.servlet.ServletResponse;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.File;
import java.io.IOException;
import java.net.http.HttpHeaders;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.Callable;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.Function;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;

/**
 * Rate limits of Tidegate for servlets, and for callers of an API that is limited. Copy this file.
 *
 * <p>An object is a connection that is opened once, kept, and shared by all requests.
 */
public final class Tidegate implements AutoCloseable {
    // --- The service: asks Tidegate before it answers ---

    /** Sent in place of the rule's limit. */
    public record Limit(int requests, RateLimitUnit unit) {}

    /** An entry of a descriptor, such as {@code new Entry("user", "ann")}. */
    public record Entry(String key, String value) {}

    /**
     * What is limited; the order of the entries matters.
     *
     * @param hits the cost; null: that of the request; 0 looks without spending
     * @param limit null: that of the rule
     */
    public record Descriptor(List<Entry> entries, Long hits, Limit limit) {
        public Descriptor(Entry... entries) {
            this(List.of(entries), null, null);
        }

        RateLimitDescriptor givenBack(int hits) {
            var given = new Descriptor(entries, this.hits == null ? Long.valueOf(hits) : this.hits, limit);
            return given.toProto().toBuilder().setIsNegativeHits(true).build();
        }

        RateLimitDescriptor toProto() {
            var message = RateLimitDescriptor.newBuilder();
            entries.forEach(entry -> message.addEntriesBuilder().setKey(entry.key()).setValue(entry.value()));
            if (hits != null) {
                message.setHitsAddend(UInt64Value.of(hits));
            }
            if (limit != null) {
                message.getLimitBuilder().setRequestsPerUnit(limit.requests()).setUnit(limit.unit());
            }
            return message.build();
        }
    }

    /** A request to Tidegate: what it costs, and what is limited. Without descriptors there is no limit. */
    public record LimitRequest(int hits, List<Descriptor> descriptors) {}

    /**
     * The answer.
     *
     * @param status 200 (go on), 429 (refused) or 503 (no answer in time, and the service fails closed)
     * @param error why there was no answer, or null
     * @param hits of the request, for descriptors without hits of their own
     */
    public record Decision(int status, List<Entry> headers, byte[] body, Exception error, int hits) {
        /** Adds the headers to the response. If the request is not admitted, sends the whole response and returns false. */
        public boolean apply(HttpServletResponse reply) throws IOException {
            headers.forEach(header -> reply.addHeader(header.key(), header.value()));
            if (status == 200) {
                return true;
            }
            reply.setStatus(status);
            if (reply.getContentType() == null) {
                reply.setContentType("text/plain; charset=utf-8");
            }
            reply.getOutputStream().write(body);
            return false;
        }
    }

    private static final byte[] EMPTY = {};

    /** The one method, so that no stub has to be generated for it. */
    private static final MethodDescriptor<RateLimitRequest, RateLimitResponse> METHOD =
            MethodDescriptor.<RateLimitRequest, RateLimitResponse>newBuilder()
                    .setType(MethodDescriptor.MethodType.UNARY)
                    .setFullMethodName("envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
                    .setRequestMarshaller(ProtoUtils.marshaller(RateLimitRequest.getDefaultInstance()))
                    .setResponseMarshaller(ProtoUtils.marshaller(RateLimitResponse.getDefaultInstance()))
                    .build();

    private static final System.Logger LOGGER = System.getLogger(Tidegate.class.getName());
    /** From one line about calls without a decision to the next. */
    private static final Duration LOG_PAUSE = Duration.ofSeconds(10);

    private final ManagedChannel channel;
    private final String address;
    private final String domain;
    private final Duration timeout;
    private final boolean failOpen;
    private volatile Consumer<Exception> onUndecided = error -> {};
    /** In the time of {@link System#nanoTime}. */
    private long quietUntil = System.nanoTime();
    private long unlogged;

    /**
     * Starts to connect.
     *
     * @param timeout the longest that a request waits for an answer
     * @param failOpen lets requests go on without an answer; otherwise they get status 503
     */
    public Tidegate(String address, String domain, Duration timeout, boolean failOpen) {
        this(address, domain, timeout, failOpen, InsecureChannelCredentials.create());
    }

    /** The same with these credentials, such as {@code tls(new File("ca.crt"), null, null)}. */
    public Tidegate(String address, String domain, Duration timeout, boolean failOpen, ChannelCredentials credentials) {
        this.address = address;
        this.domain = domain;
        this.timeout = timeout;
        this.failOpen = failOpen;
        // A dead peer is noticed within 15 s.
        channel = Grpc.newChannelBuilder(address, credentials)
                .keepAliveTime(10, TimeUnit.SECONDS)
                .keepAliveTimeout(5, TimeUnit.SECONDS)
                .build();
        channel.getState(true);
    }

    /**
     * Credentials for a Tidegate with TLS, from PEM files.
     *
     * @param ca the CA of its certificate
     * @param certificate a client certificate where Tidegate asks for one, or null; {@code key} is its key
     */
    public static ChannelCredentials tls(File ca, File certificate, File key) throws IOException {
        var credentials = TlsChannelCredentials.newBuilder().trustManager(ca);
        if (certificate != null) {
            credentials.keyManager(certificate, key);
        }
        return credentials.build();
    }

    /**
     * Sets what is called with the error of each call without a decision, for a metric of yours. Besides, the log has a warning of the
     * first, and then at most every 10 s with the number of those in between.
     */
    public void onUndecided(Consumer<Exception> hook) {
        onUndecided = hook;
    }

    /**
     * Asks about a request, in a filter or in a servlet that has read the body; 0 hits mean 1. Without an answer, {@code failOpen}
     * decides, and {@code error} says why.
     */
    public Decision decide(LimitRequest limited) {
        int hits = Math.max(limited.hits(), 1);
        if (limited.descriptors().isEmpty()) {
            return new Decision(200, List.of(), EMPTY, null, hits);
        }
        var request = RateLimitRequest.newBuilder().setDomain(domain).setHitsAddend(hits);
        limited.descriptors().forEach(descriptor -> request.addDescriptors(descriptor.toProto()));
        try {
            var answer = ask(request.build());
            var headers = new ArrayList<Entry>();
            for (HeaderValue header : answer.getResponseHeadersToAddList()) {
                headers.add(new Entry(header.getKey(), header.getValue()));
            }
            boolean isRefused = answer.getOverallCode() == RateLimitResponse.Code.OVER_LIMIT;
            return new Decision(isRefused ? 429 : 200, headers, answer.getRawBody().toByteArray(), null, hits);
        } catch (StatusRuntimeException error) {
            report(error, failOpen ? "The request goes on without a limit" : "The request gets status 503");
            if (failOpen) {
                return new Decision(200, List.of(), EMPTY, error, hits);
            }
            byte[] body = "The rate limiter is unavailable.\n".getBytes();
            return new Decision(503, List.of(new Entry("Retry-After", "1")), body, error, hits);
        }
    }

    /**
     * Gives back the hits that an admitted request spent on these of its descriptors. Call it once for a decision at most.
     *
     * <p>Nothing is given back where Tidegate refused or did not decide: those hits may not be counted. If this call is not answered,
     * it is reported like a call without a decision, and not sent again: the hits stay counted.
     */
    public void giveBack(Decision decision, Descriptor... descriptors) {
        if (decision.status() != 200 || decision.error() != null || descriptors.length == 0) {
            return;
        }
        var request = RateLimitRequest.newBuilder().setDomain(domain);
        for (var descriptor : descriptors) {
            request.addDescriptors(descriptor.givenBack(decision.hits()));
        }
        try {
            ask(request.build());
        } catch (StatusRuntimeException error) {
            report(error, "Hits are not given back");
        }
    }

    private RateLimitResponse ask(RateLimitRequest request) {
        var inTime = CallOptions.DEFAULT.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS);
        return ClientCalls.blockingUnaryCall(channel, METHOD, inTime, request);
    }

    private void report(Exception error, String result) {
        onUndecided.accept(error);
        long more;
        synchronized (this) {
            long now = System.nanoTime();
            if (now - quietUntil < 0) {
                unlogged++;
                return;
            }
            more = unlogged;
            unlogged = 0;
            quietUntil = now + LOG_PAUSE.toNanos();
        }
        LOGGER.log(System.Logger.Level.WARNING, "Tidegate at " + address + " did not decide: " + error.getMessage() + ". " + result
                + "; " + more + " more since the last such line");
    }

    @Override
    public void close() {
        channel.shutdownNow();
    }

    /** A servlet filter; in Spring Boot, a {@code FilterRegistrationBean} of it. */
    public record LimitFilter(Tidegate tidegate, Function<HttpServletRequest, LimitRequest> describe) implements Filter {
        @Override
        public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
                throws IOException, ServletException {
            var decision = tidegate.decide(describe.apply((HttpServletRequest) request));
            if (decision.apply((HttpServletResponse) response)) {
                chain.doFilter(request, response);
            }
        }
    }

    // --- The caller: what to do when an API refuses ---

    private static final int ATTEMPTS = 5;
    private static final long BASE_MS = 100;
    private static final long LONGEST_JITTER_MS = 10_000;

    /**
     * Calls {@code send} until its response is neither 429 nor 503, at most 5 times; returns the last response.
     *
     * <p>It waits as long as Retry-After says, and then a random time of at most as long again (at least 100 ms), twice that, and
     * so on up to 10 s (full jitter), so that callers who were refused together do not return together.
     */
    public static <T> HttpResponse<T> retry(Callable<HttpResponse<T>> send) throws Exception {
        for (int attempt = 0; ; attempt++) {
            var response = send.call();
            boolean isRefused = response.statusCode() == 429 || response.statusCode() == 503;
            if (!isRefused || attempt == ATTEMPTS - 1) {
                return response;
            }
            long wait = retryAfter(response.headers()).toMillis();
            Thread.sleep(wait + jitter(Math.max(BASE_MS, wait) << attempt));
        }
    }

    private static long jitter(long mostMs) {
        return ThreadLocalRandom.current().nextLong(Math.min(LONGEST_JITTER_MS, mostMs) + 1);
    }

    /** Zero without the header, or if it is a date, which Tidegate does not send. */
    private static Duration retryAfter(HttpHeaders headers) {
        return Duration.ofSeconds(number(headers, "retry-after").orElse(0L));
    }

    private static Optional<Long> number(HttpHeaders headers, String name) {
        return headers.firstValue(name).filter(value -> value.matches("\\d{1,12}")).map(Long::valueOf);
    }

    /**
     * Keeps a caller below the limit that the responses report.
     *
     * <p>While no limit is known, one call is in flight; afterwards as many as the last response left, less those in flight.
     * Without any left it waits until the reset, and a random time of at most as long again (10 s at most): others may wait for
     * the same reset.
     */
    public static final class Pacer {
        private boolean isKnown;
        private long remaining;
        /** In the time of {@link System#nanoTime}. */
        private long until = System.nanoTime();
        private int inFlight;

        /** Waits for its turn and calls {@code send}. */
        public <T> HttpResponse<T> call(Callable<HttpResponse<T>> send) throws Exception {
            enter();
            Optional<Reported> reported = Optional.empty();
            try {
                var response = send.call();
                reported = reportedLimit(response.headers());
                return response;
            } finally {
                leave(reported);
            }
        }

        private synchronized void enter() throws InterruptedException {
            while (true) {
                long wait = until - System.nanoTime();
                if (wait <= 0) {
                    isKnown = false;
                }
                if (isKnown ? remaining >= 1 : inFlight == 0) {
                    break;
                }
                // Another call that is answered ends the wait early. 0 ms would be forever.
                wait(isKnown ? wait / 1_000_000 + 1 : 0);
            }
            remaining--;
            inFlight++;
        }

        private synchronized void leave(Optional<Reported> reported) {
            inFlight--;
            if (reported.isPresent()) {
                var reset = reported.get().reset();
                long jitter = reported.get().remaining() > 0 || reset.isNegative() ? 0 : jitter(reset.toMillis());
                isKnown = true;
                remaining = reported.get().remaining() - inFlight;
                until = System.nanoTime() + reset.plusMillis(jitter).toNanos();
            } else if (!isKnown) {
                // Without a reported limit, calls are not held back for a second.
                isKnown = true;
                remaining = Long.MAX_VALUE;
                until = System.nanoTime() + 1_000_000_000;
            }
            notifyAll();
        }
    }

    private record Reported(long remaining, Duration reset) {}

    private static final Pattern ITEM = Pattern.compile(";r=(\\d{1,12});t=(\\d{1,12})");

    /** Calls that remain, and the time until that changes; from RateLimit, RateLimit-* or X-RateLimit-*. */
    private static Optional<Reported> reportedLimit(HttpHeaders headers) {
        var wait = retryAfter(headers);
        if (!wait.isZero()) {
            return Optional.of(new Reported(0, wait));
        }
        // RateLimit: "per-user";r=1;t=46, "all";r=999;t=946. The least remaining counts, for the longest time.
        var items = ITEM.matcher(headers.firstValue("ratelimit").orElse("")).results().map(Tidegate::reported);
        var least = items.min((a, b) -> a.remaining() == b.remaining()
                ? b.reset().compareTo(a.reset())
                : Long.compare(a.remaining(), b.remaining()));
        if (least.isPresent()) {
            return least;
        }
        for (var prefix : List.of("ratelimit", "x-ratelimit")) {
            var remaining = number(headers, prefix + "-remaining");
            var reset = number(headers, prefix + "-reset");
            if (remaining.isPresent() && reset.isPresent()) {
                // X-RateLimit-Reset of Tidegate is a time in seconds of the epoch.
                var time = prefix.equals("ratelimit")
                        ? Duration.ofSeconds(reset.get())
                        : Duration.between(Instant.now(), Instant.ofEpochSecond(reset.get()));
                return Optional.of(new Reported(remaining.get(), time));
            }
        }
        return Optional.empty();
    }

    private static Reported reported(MatchResult item) {
        return new Reported(Long.parseLong(item.group(1)), Duration.ofSeconds(Long.parseLong(item.group(2))));
    }
}

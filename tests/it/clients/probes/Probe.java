package tidegate;

import envoy.service.ratelimit.v3.Rls.RateLimitRequest;
import envoy.service.ratelimit.v3.Rls.RateLimitResponse;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;

/** The probe of grpc-java: a client that a test steers. Its commands are in probe.py. */
public final class Probe {
    private static final Map<String, Object> RETRY = Map.of("retryPolicy", Map.of(
            "maxAttempts", 3.0, "initialBackoff", "0.05s", "maxBackoff", "0.1s", "backoffMultiplier", 1.0,
            "retryableStatusCodes", List.of("UNAVAILABLE")));
    private static final Map<String, Object> HEDGING = Map.of("hedgingPolicy", Map.of(
            "maxAttempts", 3.0, "hedgingDelay", "0.1s", "nonFatalStatusCodes", List.of()));
    private static final MethodDescriptor<RateLimitRequest, RateLimitResponse> METHOD =
            MethodDescriptor.<RateLimitRequest, RateLimitResponse>newBuilder()
                    .setType(MethodDescriptor.MethodType.UNARY)
                    .setFullMethodName("envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
                    .setRequestMarshaller(ProtoUtils.marshaller(RateLimitRequest.getDefaultInstance()))
                    .setResponseMarshaller(ProtoUtils.marshaller(RateLimitResponse.getDefaultInstance()))
                    .build();
    private static final Map<String, Channel> CHANNELS = new ConcurrentHashMap<>();

    private static void open(String name, String target, String ca, String retries, long keepaliveMs) throws Exception {
        var credentials = ca.equals("-")
                ? InsecureChannelCredentials.create()
                : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
        var channel = Grpc.newChannelBuilder(target, credentials)
                .keepAliveTime(keepaliveMs, TimeUnit.MILLISECONDS)
                .keepAliveTimeout(5, TimeUnit.SECONDS)
                .keepAliveWithoutCalls(true);
        if (!retries.equals("default")) {
            var policy = new java.util.HashMap<>(retries.equals("hedging") ? HEDGING : RETRY);
            policy.put("name", List.of(Map.of()));
            channel.defaultServiceConfig(Map.of("methodConfig", List.of(policy)));
        }
        if (retries.equals("off")) {
            channel.disableRetry();
        }
        CHANNELS.put(name, channel.build());
    }

    private static void call(String id, String name, String key, String value, long timeoutMs, String compression) {
        long began = System.nanoTime();
        var options = CallOptions.DEFAULT.withDeadlineAfter(timeoutMs, TimeUnit.MILLISECONDS);
        if (compression.equals("gzip")) {
            options = options.withCompression("gzip");
        }
        var request = RateLimitRequest.newBuilder().setDomain("clients");
        request.addDescriptorsBuilder().addEntriesBuilder().setKey(key).setValue(value);
        ClientCalls.asyncUnaryCall(CHANNELS.get(name).newCall(METHOD, options), request.build(), new StreamObserver<>() {
            private int code;

            @Override
            public void onNext(RateLimitResponse answer) {
                code = answer.getOverallCodeValue();
            }

            @Override
            public void onError(Throwable error) {
                ended(Status.fromThrowable(error));
            }

            @Override
            public void onCompleted() {
                ended(Status.OK);
            }

            private void ended(Status status) {
                long ms = (System.nanoTime() - began) / 1_000_000;
                System.out.println("{\"id\":%s,\"status\":%d,\"code\":%d,\"ms\":%d}"
                        .formatted(id, status.getCode().value(), code, ms));
                System.err.println(id + " " + status);
            }
        });
    }

    public static void main(String[] arguments) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in));
        for (var line = lines.readLine(); line != null; line = lines.readLine()) {
            var words = line.split(" ");
            if (words[0].equals("open")) {
                open(words[1], words[2], words[3], words[4], Long.parseLong(words[5]));
            } else {
                call(words[1], words[2], words[3], words[4], Long.parseLong(words[5]), words[6]);
            }
        }
        System.exit(0);
    }
}

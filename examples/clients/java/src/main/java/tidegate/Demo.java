package tidegate;

import static tidegate.Tidegate.tls;

import envoy.type.v3.RatelimitUnit.RateLimitUnit;
import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.File;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import java.util.logging.Level;
import java.util.logging.Logger;
import java.util.stream.Stream;
import org.apache.catalina.startup.Tomcat;
import org.apache.tomcat.util.descriptor.web.FilterDef;
import org.apache.tomcat.util.descriptor.web.FilterMap;
import tidegate.Tidegate.Descriptor;
import tidegate.Tidegate.Entry;
import tidegate.Tidegate.Limit;
import tidegate.Tidegate.LimitRequest;

/** A service with limits and its caller. */
public final class Demo {
    private static final String USAGE = """
            A service with limits and its caller.

            Demo serve 127.0.0.1:8081 open 100         a service on a free port, with 100 ms for Tidegate; closed: fail closed
                   ... open 100 CA [CERT KEY]          the same over TLS, with these PEM files
            Demo retry http://127.0.0.1:PORT/search    two calls; each is repeated while it is refused
            Demo pace http://127.0.0.1:PORT/feed       six calls, none too early

            The callers print a line for each HTTP request: status, Retry-After, and when it began and ended in ms.
            """;

    private static final Logger TOMCAT = Logger.getLogger("org.apache");

    private Demo() {}

    public static void main(String[] arguments) throws Exception {
        if (arguments.length >= 4 && arguments[0].equals("serve")) {
            var timeout = Duration.ofMillis(Long.parseLong(arguments[3]));
            serve(new Tidegate(arguments[1], "shop", timeout, arguments[2].equals("open"), credentials(arguments)));
        } else if (arguments.length == 2) {
            call(arguments[0], URI.create(arguments[1]));
        } else {
            System.err.print(USAGE);
            System.exit(2);
        }
    }

    private static ChannelCredentials credentials(String[] arguments) throws IOException {
        if (arguments.length == 4) {
            return InsecureChannelCredentials.create();
        }
        var files = Stream.of(arguments).skip(4).map(File::new).toList();
        return files.size() == 1 ? tls(files.get(0), null, null) : tls(files.get(0), files.get(1), files.get(2));
    }

    /** Limits each path for each user. An export costs 5; a trial costs 2 and brings a limit of its own. */
    private static LimitRequest describe(HttpServletRequest request) {
        var user = Optional.ofNullable(request.getHeader("X-User")).orElse("anonymous");
        var path = request.getRequestURI();
        var byPath = List.of(new Descriptor(new Entry("path", path), new Entry("user", user)));
        return switch (path) {
            case "/login", "/undecided" -> new LimitRequest(0, List.of());
            case "/export" -> new LimitRequest(5, byPath);
            case "/trial" -> {
                var limit = new Limit(4, RateLimitUnit.DAY);
                yield new LimitRequest(1, List.of(new Descriptor(List.of(new Entry("trial", user)), 2L, limit)));
            }
            default -> new LimitRequest(1, byPath);
        };
    }

    private static void serve(Tidegate tidegate) throws Exception {
        TOMCAT.setLevel(Level.WARNING);
        var undecided = new AtomicLong();
        tidegate.onUndecided(error -> undecided.incrementAndGet());
        var tomcat = new Tomcat();
        var directory = Path.of(System.getProperty("java.io.tmpdir"), "limited").toString();
        tomcat.setBaseDir(directory);
        tomcat.setPort(0);
        tomcat.getConnector().setProperty("address", "127.0.0.1");
        var context = tomcat.addContext("", null);
        var filter = new FilterDef();
        filter.setFilterName("limit");
        filter.setFilter(new Tidegate.LimitFilter(tidegate, Demo::describe));
        context.addFilterDef(filter);
        var everything = new FilterMap();
        everything.setFilterName("limit");
        everything.addURLPattern("/*");
        context.addFilterMap(everything);
        Tomcat.addServlet(context, "done", new HttpServlet() {
            @Override
            protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
                response.setContentType("text/plain");
                response.getWriter().println(request.getRequestURI() + ": done");
            }
        });
        context.addServletMappingDecoded("/", "done");
        Tomcat.addServlet(context, "undecided", new HttpServlet() {
            @Override
            protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
                response.getWriter().println(undecided.get());
            }
        });
        context.addServletMappingDecoded("/undecided", "undecided");
        Tomcat.addServlet(context, "login", new HttpServlet() {
            @Override
            protected void doPost(HttpServletRequest request, HttpServletResponse response) throws IOException {
                login(tidegate, request, response);
            }
        });
        context.addServletMappingDecoded("/login", "login");
        tomcat.start();
        System.out.println("http://127.0.0.1:" + tomcat.getConnector().getLocalPort());
        tomcat.getServer().await();
    }

    /** A stand-in for your lookup and its hash. */
    private static boolean isRight(String account, String password) {
        return !account.isEmpty() && password.equals("right");
    }

    private static void login(Tidegate tidegate, HttpServletRequest request, HttpServletResponse response) throws IOException {
        var name = Optional.ofNullable(request.getParameter("account")).orElse("");
        var password = Optional.ofNullable(request.getParameter("password")).orElse("");
        // Behind a proxy, the address that the proxy vouches for: Tomcat's RemoteIpValve.
        var address = new Descriptor(new Entry("path", "/login"), new Entry("remote_address", request.getRemoteAddr()));
        var account = new Descriptor(new Entry("path", "/login"), new Entry("account", name));
        var decision = tidegate.decide(new LimitRequest(1, List.of(address, account)));
        response.setContentType("text/plain");
        if (decision.error() != null) {
            // Also where others fail open: without a decision, guesses would have no limit.
            response.setStatus(503);
            response.setHeader("Retry-After", "1");
            response.getWriter().println("Try again later.");
        } else if (decision.apply(response)) {
            if (isRight(name, password)) {
                // The hit of the account only: whoever knows one password must not get more guesses at others from an address.
                tidegate.giveBack(decision, account);
                response.getWriter().println("Welcome.");
            } else {
                response.setStatus(401);
                response.getWriter().println("Wrong account or password.");
            }
        }
    }

    private static void call(String how, URI url) throws Exception {
        long began = System.nanoTime();
        var client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        var request = HttpRequest.newBuilder(url).header("X-User", how).build();
        Callable<HttpResponse<String>> send = () -> {
            long start = (System.nanoTime() - began) / 1_000_000;
            var response = client.send(request, HttpResponse.BodyHandlers.ofString());
            long end = (System.nanoTime() - began) / 1_000_000;
            var after = response.headers().firstValue("retry-after").orElse("-");
            System.out.println(response.statusCode() + " " + after + " " + start + " " + end);
            return response;
        };
        if (how.equals("retry")) {
            Tidegate.retry(send);
            Tidegate.retry(send);
            return;
        }
        var pacer = new Tidegate.Pacer();
        var threads = Executors.newFixedThreadPool(6);
        var calls = new ArrayList<Callable<HttpResponse<String>>>();
        for (int i = 0; i < 6; i++) {
            calls.add(() -> pacer.call(send));
        }
        for (var call : threads.invokeAll(calls)) {
            call.get();
        }
        threads.shutdown();
    }
}

/* Preloaded into a node of a cluster, cuts it from the other nodes while a file of one byte is not 0: whatever it does on
   the cluster bus fails. Clients notice nothing. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static const volatile char *is_cut;

static int is_on_bus(const struct sockaddr *address) {
    const char *first = getenv("BUS_FIRST"), *last = getenv("BUS_LAST");
    if (address->sa_family != AF_INET || !first || !last) return 0;
    int port = ntohs(((const struct sockaddr_in *)address)->sin_port);
    return atoi(first) <= port && port <= atoi(last);
}

static int is_cut_now(void) {
    if (!is_cut) {
        int file = open(getenv("BUS_IS_CUT"), O_RDONLY);
        void *byte = mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
        if (byte == MAP_FAILED) abort();
        is_cut = byte;
    }
    return *is_cut;
}

static int is_lost(int socket) {
    struct sockaddr_storage address;
    struct sockaddr *ends = (struct sockaddr *)&address;
    socklen_t own = sizeof address, peer = sizeof address;
    if (!is_cut_now()) return 0;
    if (!getsockname(socket, ends, &own) && is_on_bus(ends)) return 1;
    return !getpeername(socket, ends, &peer) && is_on_bus(ends);
}

ssize_t read(int file, void *bytes, size_t length) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    if (!is_lost(file)) return real(file, bytes, length);
    errno = ECONNRESET;
    return -1;
}

ssize_t write(int file, const void *bytes, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (!is_lost(file)) return real(file, bytes, length);
    errno = ECONNRESET;
    return -1;
}

int connect(int socket, const struct sockaddr *address, socklen_t length) {
    static int (*real)(int, const struct sockaddr *, socklen_t);
    if (!real) real = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect");
    if (!is_cut_now() || !is_on_bus(address)) return real(socket, address, length);
    errno = ECONNREFUSED;
    return -1;
}

/* Names of a program: getaddrinfo answers for the name in RESOLVE_NAME with the addresses in the file RESOLVE_FILE, one a line and in
   that order, and does not answer while the file RESOLVE_WHILE exists. A file without a line: the name is not known. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    static int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    if (!real) real = (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(RTLD_NEXT, "getaddrinfo");
    const char *name = getenv("RESOLVE_NAME"), *path = getenv("RESOLVE_FILE"), *hangs = getenv("RESOLVE_WHILE");
    if (!node || !name || !path || !hangs || strcmp(node, name)) return real(node, service, hints, found);
    while (access(hangs, F_OK) == 0) usleep(10 * 1000);
    FILE *file = fopen(path, "r");
    char line[64];
    struct addrinfo **end = found;
    *found = NULL;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (real(line, service, hints, end)) continue;
        while (*end) end = &(*end)->ai_next;
    }
    if (file) fclose(file);
    return *found ? 0 : EAI_NONAME;
}

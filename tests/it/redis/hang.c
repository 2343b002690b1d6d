// A file system that does not answer: opening a path that contains HANG_PATH does not return while the file HANG_WHILE exists. The
// link HANG_SEEN tells that an open waits.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static void wait_for_answer(const char *path) {
    const char *part = getenv("HANG_PATH");
    const char *mark = getenv("HANG_WHILE");
    const char *seen = getenv("HANG_SEEN");
    while (part && mark && seen && strstr(path, part) && access(mark, F_OK) == 0) {
        // It may be there already.
        int made = symlink("seen", seen);
        (void)made;
        usleep(20 * 1000);
    }
}

int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    if (!real) {
        real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    }
    wait_for_answer(path);
    return real(path, flags, mode);
}

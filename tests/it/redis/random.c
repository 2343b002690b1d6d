/* Gives a program the same random numbers each time that it is run. */
#include <string.h>
#include <sys/random.h>
#include <sys/types.h>

ssize_t getrandom(void *bytes, size_t length, unsigned flags) {
    (void)flags;
    memset(bytes, 7, length);
    return (ssize_t)length;
}

/* Preloaded into one node's ranks: their wall clock is 10 s ahead, as on a node whose time service has died. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME && code == 0) now->tv_sec += 10;
  return code;
}

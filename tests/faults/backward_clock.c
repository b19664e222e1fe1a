/* LD_PRELOAD: the wall clock reads BACKWARD_CLOCK seconds earlier, and runs backwards, a minute for each second. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t backward(void) {
  static time_t first;
  struct timespec true_time;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &true_time);
  if (!first) first = true_time.tv_sec;
  const char *earlier = getenv("BACKWARD_CLOCK");
  return first - (earlier ? atol(earlier) : 0) - 60 * (true_time.tv_sec - first);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int status = syscall(SYS_clock_gettime, clock, time);
  if (clock == CLOCK_REALTIME && !status) time->tv_sec = backward();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  now->tv_sec = backward();
  now->tv_usec = 0;
  return 0;
}

time_t time(time_t *now) {
  time_t seconds = backward();
  if (now) *now = seconds;
  return seconds;
}

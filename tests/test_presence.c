/* `onebit status`: ranks that wait are listed with whom they wait for, while they do. */
#include <sys/wait.h>

#include "tests/support.h"
#include "tests/support_sockets.h"

/* Returns the lines that it prints of this process. */
static void ask(char text[4096]) {
  char line[1024], own[32];
  FILE *pipe = popen("tools/onebit status", "r");
  size_t length = 0;
  cr_assert(pipe);
  *text = '\0';
  snprintf(own, sizeof own, "%ld ", (long)getpid());
  while (fgets(line, sizeof line, pipe))
    if (strncmp(line, own, strlen(own)) == 0)
      length += (size_t)snprintf(text + length, 4096 - length, "%s", line);
  cr_assert(pclose(pipe) == 0);
}

static bool await_text(const char *wanted) {
  char text[4096] = "";
  for (int k = 0; k < 300; k++) {
    ask(text);
    if (strstr(text, wanted))
      return true;
    nanosleep(&(struct timespec){0, 100000000}, NULL);
  }
  return cr_log_error("\"%s\" is not in: %s", wanted, text), false;
}

static pthread_barrier_t barrier;

/* Rank 1 comes late, and calls late. */
static void late_twice(onebit_sockets_options_t *options, void *context) {
  float value = 1;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  (void)context;
  options->timeout = 100;
  if (options->rank == 1)
    CHECK(await_text("rank 0 of 2 over sockets: sockets: 127.0.0.1:"), "no rank 0");
  if (options->rank == 1)
    CHECK(await_text(" s for rank 1 to join"), "it does not wait");
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_OK);
  if (options->rank == 1)
    CHECK(await_text("rank 0 of 2 over sockets: allreduce call 1 of plan 1 (4 bytes): waiting "),
          "rank 0 does not wait");
  CHECK_STATUS(onebit_allreduce(&value, &value, plan), ONEBIT_OK);
  pthread_barrier_wait(&barrier);
  if (options->rank == 1)
    CHECK(await_text("rank 1 of 2 over sockets: waits for no rank since "), "it waits");
  pthread_barrier_wait(&barrier);
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
}

Test(presence, ranks_that_wait_are_listed) {
  char text[4096];
  pthread_barrier_init(&barrier, NULL, 2);
  sockets_attempt(2, 1, 1, late_twice, NULL);
  checks_must_hold();
  ask(text);
  cr_expect_str_eq(text, "");
}

/* The file of a process that was killed goes away. */
Test(presence, a_dead_process_is_not_listed) {
  char path[64], command[128];
  snprintf(path, sizeof path, "/tmp/onebit-%lu/%ld-999", (unsigned long)geteuid(), (long)getpid());
  snprintf(command, sizeof command, "mkdir -p -m 700 /tmp/onebit-%lu && echo rank >%s",
           (unsigned long)geteuid(), path);
  cr_assert(system(command) == 0);
  char text[4096];
  ask(text);
  cr_expect_str_eq(text, "");
  cr_expect(access(path, F_OK) != 0);
}

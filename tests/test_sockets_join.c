/*
 * Tests that ranks over sockets find each other in spite of disturbances: another job at the same
 * port, another program, a rank that was killed and started again, or a child process that keeps a
 * dead rank's files open. Either the result is correct, or all ranks that have connected get an
 * error.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/process.h"
#include "collectives/communicator.h"
#include "collectives/transports/sockets_rendezvous.h"
#include "tests/support.h"
#include "tests/support_ports.h"
#include "tests/support_transports.h"

enum { COUNT = 1000 };

static char where[64];

static void choose_port(void) {
  snprintf(where, sizeof where, "127.0.0.1:%d", port_reserve(AF_INET, NULL));
}

/* A rank that is a thread, with its job and its outcome. */
struct rank {
  int rank, size;
  const char *secret;
  double timeout;
  int again; /* communicators to create after the first one, which still exists */
  pthread_t thread;
  onebit_status_t status;
  float mean;
  char message[512];
};

static onebit_status_t sum_up(onebit_comm_t comm, struct rank *rank) {
  float values[COUNT], mean[COUNT];
  onebit_plan_t plan = NULL;
  for (int i = 0; i < COUNT; i++)
    values[i] = rank->secret && strcmp(rank->secret, "B") == 0 ? 100.0f : 1.0f;
  onebit_status_t status = onebit_plan_create(comm, COUNT, NULL, &plan);
  if (status == ONEBIT_OK)
    status = onebit_allreduce(values, mean, plan);
  rank->mean = mean[7];
  onebit_plan_destroy(plan);
  return status;
}

static void run_rank(struct rank *rank, int again) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  onebit_comm_t comm = NULL;
  options.rank = rank->rank;
  options.ranks = rank->size;
  options.rendezvous = where;
  options.secret = rank->secret && *rank->secret ? rank->secret : NULL;
  options.timeout = rank->timeout > 0 ? rank->timeout : 30;
  rank->status = onebit_comm_create_sockets(&options, &comm);
  if (rank->status == ONEBIT_OK)
    rank->status = sum_up(comm, rank);
  snprintf(rank->message, sizeof rank->message, "%s", onebit_last_error());
  if (again > 0 && rank->status == ONEBIT_OK)
    run_rank(rank, again - 1);
  onebit_comm_destroy(comm);
}

static void *rank_thread(void *rank) {
  run_rank(rank, ((struct rank *)rank)->again);
  return NULL;
}

static void start_rank(struct rank *rank) {
  cr_assert(pthread_create(&rank->thread, NULL, rank_thread, rank) == 0);
}

static void join_all(struct rank *ranks, int count) {
  for (int k = 0; k < count; k++)
    pthread_join(ranks[k].thread, NULL);
}

static void expect_error(const struct rank *rank, const char *words) {
  cr_expect_eq(rank->status, ONEBIT_ERROR_TRANSPORT, "%d: %s", rank->status, rank->message);
  cr_expect(strstr(rank->message, words), "\"%s\" is not in: %s", words, rank->message);
}

static void pause_shortly(void) { nanosleep(&(struct timespec){0, 100000000}, NULL); }

static int connect_raw(void) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int file = socket(AF_INET, SOCK_STREAM, 0);
  to.sin_port = htons((uint16_t)atoi(strchr(where, ':') + 1));
  while (connect(file, (struct sockaddr *)&to, sizeof to) != 0)
    usleep(1000);
  return file;
}

/* Starts rank 0, and returns when rank 0 listens at the port. */
static void start_first(struct rank *rank) {
  start_rank(rank);
  close(connect_raw());
}

static void forget_names(void) {
  static const char *const names[] = {"ONEBIT_JOB",     "TORCHELASTIC_RUN_ID",
                                      "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                      "PALS_APID",      "FLUX_JOB_ID",
                                      "SLURM_JOB_ID",   "SLURM_STEP_ID",
                                      "PBS_JOBID",      "LSB_JOBID"};
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
    unsetenv(names[k]);
  choose_port();
}

/* --- Two jobs at one port ----------------------------------------------------------------------*/

/* If jobs have no names, the ranks 0 and 1 that connect first could belong to either job. All ranks
 * must get an error. */
Test(sockets_join, two_jobs_without_names) {
  struct rank ranks[4] = {{.rank = 0, .size = 2},
                          {.rank = 1, .size = 2},
                          {.rank = 1, .size = 2},
                          {.rank = 0, .size = 2, .timeout = 3}};
  forget_names();
  ob_join_quiet = 20;
  for (int k = 0; k < 3; k++, pause_shortly())
    start_rank(&ranks[k]);
  join_all(ranks, 3);
  for (int k = 0; k < 3; k++)
    expect_error(&ranks[k], "two processes joined as rank 1 at 127.0.0.1:");
  start_rank(&ranks[3]);
  join_all(&ranks[3], 1);
  expect_error(&ranks[3], "for rank 1 to join");
}

/* The second rank 0 finds the port in use, and notifies the first rank 0. */
Test(sockets_join, a_second_rank_0) {
  struct rank ranks[3] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}, {.rank = 0, .size = 2}};
  forget_names();
  ob_join_quiet = 20;
  start_first(&ranks[0]);
  start_rank(&ranks[1]);
  sleep(1); /* rank 1 must join within this second */
  start_rank(&ranks[2]);
  join_all(ranks, 3);
  expect_error(&ranks[0], "two processes joined as rank 0 at");
  expect_error(&ranks[1], "two processes joined as rank 0 at");
  expect_error(&ranks[2], "cannot listen at 127.0.0.1:");
}

Test(sockets_join, two_jobs_with_names) {
  struct rank ranks[4] = {{.rank = 0, .size = 2, .secret = "A"},
                          {.rank = 1, .size = 2, .secret = "B", .timeout = 1},
                          {.rank = 0, .size = 2, .secret = "B"},
                          {.rank = 1, .size = 2, .secret = "A"}};
  choose_port();
  start_first(&ranks[0]);
  for (int k = 1; k < 4; k++, pause_shortly())
    start_rank(&ranks[k]);
  join_all(ranks, 4);
  for (int k = 0; k < 4; k += 3)
    cr_expect(ranks[k].status == ONEBIT_OK && fabsf(ranks[k].mean - 1) < 0.1f, "rank %d: %s, %g",
              ranks[k].rank, ranks[k].message, (double)ranks[k].mean);
  expect_error(&ranks[2], "Address already in use: another program or job uses this port");
  cr_expect_eq(ranks[1].status,
               ONEBIT_ERROR_TRANSPORT); /* whether or not the job at the port has ended */
}

/* The next communicator of the same ranks can still be created at the same port. */
Test(sockets_join, one_after_the_other) {
  struct rank ranks[2] = {{.rank = 0, .size = 2, .again = 2}, {.rank = 1, .size = 2, .again = 2}};
  forget_names();
  ob_join_quiet = 0.01;
  start_rank(&ranks[0]), start_rank(&ranks[1]);
  join_all(ranks, 2);
  for (int k = 0; k < 2; k++)
    cr_expect_eq(ranks[k].status, ONEBIT_OK, "%s", ranks[k].message);
}

/* --- Names -------------------------------------------------------------------------------------*/

static struct ob_job job_of(const char *secret) {
  struct ob_job job;
  ob_job_find(secret, &job);
  return job;
}

static void expect_job(const char *name, const char *value, bool exact) {
  setenv(name, value, 1);
  struct ob_job job = job_of(NULL);
  cr_expect_str_eq(job.named, name);
  cr_expect_eq(job.exact, exact, "%s", name);
  setenv(name, "another", 1);
  cr_expect_neq(job_of(NULL).hash[0], job.hash[0], "%s", name);
}

/* Sets the environment variables that name a job, in the order of rising priority: each one
 * replaces the name before it. */
Test(sockets_join, names_of_a_job) {
  forget_names();
  cr_expect_str_eq(job_of(NULL).named, "");
  cr_expect(!job_of(NULL).exact);
  expect_job("LSB_JOBID", "7", false);
  expect_job("PBS_JOBID", "7.host", false);
  expect_job("SLURM_JOB_ID", "7", false);
  uint64_t before = job_of(NULL).hash[0];
  setenv("SLURM_STEP_ID", "1", 1);
  cr_expect(job_of(NULL).exact && job_of(NULL).hash[0] != before);
  expect_job("FLUX_JOB_ID", "f1", true);
  expect_job("PALS_APID", "7", true);
  expect_job("OMPI_MCA_ess_base_jobid", "7", true);
  expect_job("PMIX_NAMESPACE", "prterun-7", true);
  expect_job("TORCHELASTIC_RUN_ID", "7", true);
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  cr_expect_str_eq(job_of(NULL).named, "PMIX_NAMESPACE");
  expect_job("ONEBIT_JOB", "mine", true);
  cr_expect_str_eq(job_of("of this job").named, "options->secret");
  cr_expect_neq(job_of("of this job").hash[1], job_of("of that job").hash[1]);
}

/* --- Other programs, and ranks that end --------------------------------------------------------*/

/* Another program sends rank 1's greeting and nothing more. Rank 1 must still be able to join. */
Test(sockets_join, a_stranger_takes_no_place) {
  struct ob_greeting greeting = {.magic = OB_GREETING_MAGIC,
                                 .version = OB_GREETING_VERSION,
                                 .kind = OB_JOIN,
                                 .rank = 1,
                                 .size = 2};
  struct rank ranks[2] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}};
  forget_names();
  ob_join_quiet = 0.1;
  start_rank(&ranks[0]);
  int file = connect_raw(), old = connect_raw();
  cr_assert(send(file, &greeting, sizeof greeting, 0) == sizeof greeting);
  greeting.version = 1;
  cr_assert(send(old, &greeting, 104, 0) == 104);
  pause_shortly();
  start_rank(&ranks[1]);
  join_all(ranks, 2);
  struct ob_answer answer = {0};
  cr_expect(recv(old, &answer, sizeof answer, MSG_WAITALL) == sizeof answer);
  cr_expect(strstr(answer.text, "another version"), "%s", answer.text);
  close(file), close(old);
  for (int k = 0; k < 2; k++)
    cr_expect_eq(ranks[k].status, ONEBIT_OK, "%s", ranks[k].message);
}

/* Starts a rank in a process of its own, which exits with status 0 if it is too late. */
static pid_t fork_rank(struct rank *rank) {
  static const char late[] = "all 2 ranks of the job at this port are already connected";
  pid_t process = fork();
  if (process == 0) {
    run_rank(rank, 0);
    _exit(strstr(rank->message, late) ? 0 : 1);
  }
  return process;
}

/* If a job has no name, rank 0 keeps its port after all ranks have joined, so that a rank that
 * comes later gets an error. */
Test(sockets_join, one_that_comes_later) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  struct rank other = {.rank = 1, .size = 2};
  struct rank late = {.rank = 1, .size = 2, .timeout = 3};
  int status;
  onebit_comm_t comm = NULL;
  forget_names();
  ob_join_quiet = 0.01;
  start_rank(&other);
  options.ranks = 2;
  options.rendezvous = where;
  cr_assert_eq(onebit_comm_create_sockets(&options, &comm), ONEBIT_OK, "%s", onebit_last_error());
  struct rank self = {.rank = 0};
  cr_assert_eq(sum_up(comm, &self), ONEBIT_OK);
  join_all(&other, 1);
  pid_t process = fork_rank(&late);
  while (waitpid(process, &status, WNOHANG) == 0)
    comm->transport->progress(comm);
  cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it was told something else");
  onebit_comm_destroy(comm);
}

Test(sockets_join, killed_while_it_joins) {
  struct rank ranks[3] = {{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 2, .size = 3}};
  forget_names();
  ob_join_quiet = 0.1;
  pid_t first = fork_rank(&ranks[1]);
  start_rank(&ranks[0]);
  for (int k = 0; k < 3; k++)
    pause_shortly();
  kill(first, SIGKILL);
  waitpid(first, NULL, 0);
  start_rank(&ranks[1]), start_rank(&ranks[2]);
  join_all(ranks, 3);
  for (int k = 0; k < 3; k++)
    cr_expect_eq(ranks[k].status, ONEBIT_OK, "%s", ranks[k].message);
}

/* The rank dies and its child lives on. The child must close the dead rank's files. */
static void die_before_a_child(int ready) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  onebit_comm_t comm = NULL;
  float value = 1;
  onebit_plan_t plan = NULL;
  options.rank = 1;
  options.ranks = 2;
  options.rendezvous = where;
  options.secret = "of this test";
  options.timeout = 60;
  if (onebit_comm_create_sockets(&options, &comm) != ONEBIT_OK ||
      onebit_plan_create(comm, 1, NULL, &plan) != ONEBIT_OK)
    _exit(1);
  if (fork() == 0) {
    bool refused = onebit_allreduce(&value, &value, plan) == ONEBIT_ERROR_TRANSPORT &&
                   strstr(onebit_last_error(), "forked") &&
                   onebit_comm_abort(comm) == ONEBIT_ERROR_TRANSPORT;
    onebit_plan_destroy(plan);
    onebit_comm_destroy(comm);
    (void)!write(ready, refused ? "y" : "n", 1);
    pause();
  }
  pause();
}

Test(sockets_join, a_child_does_not_hide_a_dead_rank) {
  struct rank self = {.rank = 0, .size = 2, .secret = "of this test"};
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  float value = 1;
  char said = 0;
  int ready[2];
  choose_port();
  cr_assert(pipe(ready) == 0);
  pid_t process = fork();
  if (process == 0) {
    setpgid(0, 0);
    die_before_a_child(ready[1]);
  }
  options.ranks = 2;
  options.rendezvous = where;
  options.secret = self.secret;
  options.timeout = 60;
  cr_assert_eq(onebit_comm_create_sockets(&options, &comm), ONEBIT_OK, "%s", onebit_last_error());
  cr_assert_eq(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_OK);
  cr_assert(read(ready[0], &said, 1) == 1 && said == 'y', "the child could use its parent's");
  double begin = ob_seconds();
  kill(process, SIGKILL);
  cr_expect_eq(onebit_allreduce(&value, &value, plan), ONEBIT_ERROR_TRANSPORT);
  cr_expect(strstr(onebit_last_error(), "rank 1"), "%s", onebit_last_error());
  cr_expect(ob_seconds() - begin < 20, "it took %g s", ob_seconds() - begin);
  kill(-process, SIGKILL); /* ends the child */
  waitpid(process, NULL, 0);
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
}

/* --- Open files --------------------------------------------------------------------------------*/

static void check_file_limit(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  (void)context;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("Too many open files: this process may open 60 files (ulimit -n)");
}

Test(sockets_join, too_few_files) {
  struct rlimit limit = {60, 60};
  cr_assert(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  double begin = ob_seconds();
  sockets_attempt(4, 1, 16, check_file_limit, NULL);
  cr_expect(ob_seconds() - begin < 15, "it took %g s", ob_seconds() - begin);
}

static void create_communicator(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  (void)context;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  onebit_comm_destroy(comm);
}

Test(sockets_join, the_soft_limit_is_raised) {
  struct rlimit limit;
  cr_assert(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  if (limit.rlim_max < 400)
    cr_skip_test("the hard limit is %lu", (unsigned long)limit.rlim_max);
  limit.rlim_cur = 40;
  cr_assert(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  sockets_attempt(4, 1, 16, create_communicator, NULL);
}

/*
 * Makes every system call of connecting fail once, on each of three ranks, first as if this process
 * or host lacked a resource, then as if the other side had gone. Each time all ranks must end in
 * time. They all succeed or all get an error, which names the call on the rank where it failed, and
 * names this rank on the others.
 */

enum { RANKS = 3, MAX_SECONDS = 10 };
#define SHORT_LAST 0.3
#define LONG_LAST  3.0

struct fault {
  const char *call;
  int lack, absence;
};

static const struct fault faults[] = {{"socket", EMFILE, ENFILE},
                                      {"bind", EADDRINUSE, EACCES},
                                      {"listen", ENOBUFS, EADDRINUSE},
                                      {"accept", EMFILE, ECONNABORTED},
                                      {"connect", EADDRNOTAVAIL, ECONNREFUSED},
                                      {"getsockname", ENOBUFS, ENOMEM},
                                      {"send", ENOBUFS, EPIPE},
                                      {"recv", ENOMEM, ECONNRESET},
                                      {"epoll_create", EMFILE, ENOMEM},
                                      {"epoll_ctl", ENOSPC, ENOMEM},
                                      {"getrandom", ENOSYS, EIO}};

static _Thread_local bool victim;
static struct {
  int rank;
  bool absent;
  long at, calls;
  const struct fault *struck;
} now;

/* Counts the system calls of the victim's thread. Returns the error of the chosen one, and 0 for
 * others. */
static int fail_chosen_call(const char *call) {
  if (!victim || ++now.calls != now.at)
    return 0;
  for (size_t k = 0; k < sizeof faults / sizeof faults[0]; k++)
    if (strcmp(faults[k].call, call) == 0)
      now.struck = &faults[k];
  if (!now.struck)
    abort();
  return now.absent ? now.struck->absence : now.struck->lack;
}

struct outcome {
  onebit_status_t status[RANKS];
  char message[RANKS][512];
};

static void connect_rank(onebit_sockets_options_t *options, void *context) {
  struct outcome *outcome = context;
  onebit_comm_t comm = NULL;
  victim = options->rank == now.rank;
  if (now.rank == 0 && now.at <= 3)
    options->timeout = 1; /* without rank 0's listener no rank can be notified */
  outcome->status[options->rank] = onebit_comm_create_sockets(options, &comm);
  snprintf(outcome->message[options->rank], sizeof outcome->message[0], "%s", onebit_last_error());
  onebit_comm_destroy(comm);
}

/* The victim's message must have the system's text for the error. The messages of the others must
 * name the victim, or a rank that was notified before them and has closed its connections. */
static void check_outcome(const struct outcome *outcome, double seconds) {
  const char *words = strerror(now.absent ? now.struck->absence : now.struck->lack);
  char name[16];
  snprintf(name, sizeof name, "rank %d", now.rank);
  CHECK(seconds <= MAX_SECONDS, "rank %d, call %ld (%s: %s): %g s", now.rank, now.at,
        now.struck->call, words, seconds);
  for (int rank = 0; rank < RANKS; rank++) {
    const char *message = outcome->message[rank];
    bool failed = outcome->status[rank] != ONEBIT_OK;
    bool named = strstr(message, rank == now.rank ? words : name) || strstr(message, words) ||
                 (rank != now.rank && strstr(message, "or its communicator has failed"));
    CHECK(!failed || named || now.absent, "rank %d, call %ld (%s: %s): rank %d says: %s", now.rank,
          now.at, now.struck->call, words, rank, message);
    CHECK(failed == (outcome->status[0] != ONEBIT_OK), "rank %d, call %ld (%s: %s): rank %d: %s",
          now.rank, now.at, now.struck->call, words, rank, message);
  }
}

/* Runs the job with one failing call. Returns its duration in seconds. */
static double attempt_join(struct outcome *outcome, int rank, bool absent, long at) {
  *outcome = (struct outcome){0};
  now.rank = rank, now.absent = absent, now.at = at, now.calls = 0, now.struck = NULL;
  double begin = ob_seconds();
  sockets_attempt(RANKS, 1, 1, connect_rank, outcome);
  return ob_seconds() - begin;
}

/* The victim must notify the others within ob_join_last. On a busy machine SHORT_LAST may be too
 * short, and the others wait for their timeout. A second attempt with LONG_LAST shows whether that
 * was the reason. */
static void fail_each_call(int rank, bool absent) {
  for (long at = 1;; at += test_share() > 1 ? 1 + at / 16 : 1) {
    struct outcome outcome;
    double seconds = attempt_join(&outcome, rank, absent, at);
    if (seconds > MAX_SECONDS) {
      ob_join_last = LONG_LAST;
      seconds = attempt_join(&outcome, rank, absent, at);
      ob_join_last = SHORT_LAST;
    }
    if (!now.struck)
      break;
    check_outcome(&outcome, seconds);
  }
  checks_must_hold();
}

static void fail_each_call_both_ways(int rank) {
  ob_net_fault = fail_chosen_call;
  ob_join_last = SHORT_LAST;
  fail_each_call(rank, false);
  fail_each_call(rank, true);
}

Test(sockets_faults, on_rank_0) { fail_each_call_both_ways(0); }
Test(sockets_faults, on_rank_1) { fail_each_call_both_ways(1); }
Test(sockets_faults, on_rank_2) { fail_each_call_both_ways(2); }

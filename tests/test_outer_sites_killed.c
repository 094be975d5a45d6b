/*
 * Sites that are processes, over sockets: when one is killed the others hear of it in their next
 * exchange, however long their patience, and go on without it; started again, it goes on with them,
 * and all end with the same parameters.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/support_sites.h"
#include "tests/support_sockets.h"

enum { SITES = 3, ROUNDS = 20 };

/* In memory that all processes share. */
struct job {
  onebit_outer_options_t options;
  int victim, last_step;      /* the last step that it begins */
  bool in_exchange;           /* it is killed while the others wait for it there, else after it */
  atomic_int waits;           /* the victim: it is to be killed */
  char where[SITES][32];      /* ports: of all sites, of those that are left, of all again */
  char error[2 * SITES][400]; /* of each process, the last one is the victim's successor */
  float x[SITES][SITES_ALL];
  uint32_t checksum[SITES];
};

struct site {
  struct job *job;
  int number, process;
  onebit_comm_t alone, between;
  onebit_outer_t outer;
  float p[SITES_ALL];
};

static void must(struct site *site, onebit_status_t status, onebit_status_t wanted,
                 const char *call) {
  if (status == wanted)
    return;
  snprintf(site->job->error[site->process], sizeof site->job->error[0], "%s: %s, not %s; %.200s",
           call, onebit_status_string(status), onebit_status_string(wanted), onebit_last_error());
  _exit(1);
}

#define MUST(site, call, wanted) must(site, call, wanted, #call)

static onebit_comm_t join(struct site *site, int time, int rank, int ranks) {
  onebit_sockets_options_t options = ONEBIT_SOCKETS_OPTIONS_INIT;
  onebit_comm_t comm;
  options.rank = rank;
  options.ranks = ranks;
  options.rendezvous = site->job->where[time];
  options.streams = 2;
  options.timeout = 50;
  MUST(site, onebit_comm_create_sockets(&options, &comm), ONEBIT_OK);
  return comm;
}

static void create(struct site *site, onebit_comm_t between) {
  onebit_tensor_t tensors[SITES_TENSORS];
  onebit_sites_options_t sites = {.size = sizeof sites, .patience = FOR_EVER};
  sites_list(tensors, site->p);
  MUST(site, onebit_comm_create_self(&site->alone), ONEBIT_OK);
  MUST(site,
       onebit_outer_create_sites(site->alone, between, tensors, SITES_TENSORS, &site->job->options,
                                 &sites, &site->outer),
       ONEBIT_OK);
}

static void move(struct site *site, onebit_comm_t between) {
  MUST(site, onebit_outer_move(site->outer, between), ONEBIT_OK);
  onebit_comm_destroy(site->between);
  site->between = between;
}

static void train(struct site *site, int steps) {
  for (int step = 0; step < steps; step++) {
    sites_train(site->p, site->number, 0.02f);
    MUST(site, onebit_outer_step(site->outer, 1), ONEBIT_OK);
  }
}

static void be_killed(struct site *site) {
  struct job *job = site->job;
  train(site, job->last_step - job->in_exchange);
  if (!job->in_exchange)
    raise(SIGKILL);
  atomic_store(&job->waits, 1);
  pause();
}

/* Its steps fail in the exchange in which it hears of it: the first after the victim's last. */
static void survive(struct site *site) {
  struct job *job = site->job;
  const int limit = (job->last_step / SITES_H + 2) * SITES_H;
  onebit_status_t status = ONEBIT_OK;
  for (int step = 0; status == ONEBIT_OK && step < limit; step++) {
    sites_train(site->p, site->number, 0.02f);
    status = onebit_outer_step(site->outer, 1);
  }
  MUST(site, status, ONEBIT_ERROR_TRANSPORT);
  move(site, join(site, 1, site->number - (site->number > job->victim), SITES - 1));
  train(site, 2 * SITES_H);
}

static void finish(struct site *site) {
  struct job *job = site->job;
  onebit_outer_info_t info = {.size = sizeof info};
  move(site, join(site, 2, site->number, SITES));
  train(site, ROUNDS * SITES_H);
  MUST(site, onebit_outer_synchronize(site->outer), ONEBIT_OK);
  MUST(site, onebit_outer_get_info(site->outer, &info), ONEBIT_OK);
  job->checksum[site->number] = info.checksum;
  memcpy(job->x[site->number], site->p, sizeof site->p);
  onebit_outer_destroy(site->outer);
  onebit_comm_destroy(site->between);
  onebit_comm_destroy(site->alone);
  _exit(0);
}

static void run_site(struct job *job, int number) {
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* where the test fails */
  struct site site = {.job = job, .number = number, .process = number};
  site.between = join(&site, 0, number, SITES);
  create(&site, site.between);
  if (number == job->victim)
    be_killed(&site);
  survive(&site);
  finish(&site);
}

static void restart_site(struct job *job) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct site site = {.job = job, .number = job->victim, .process = SITES};
  MUST(&site, onebit_comm_create_self(&site.between), ONEBIT_OK);
  create(&site, site.between);
  finish(&site);
}

static int end_of(pid_t process) {
  int status = 0;
  cr_assert_eq(waitpid(process, &status, 0), process);
  return status;
}

static void kill_one(onebit_outer_options_t options, int victim, int last_step, bool in_exchange) {
  struct job *job =
      mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t sites[SITES + 1];
  cr_assert(job != MAP_FAILED);
  *job = (struct job){
      .options = options, .victim = victim, .last_step = last_step, .in_exchange = in_exchange};
  for (int k = 0; k < SITES; k++)
    snprintf(job->where[k], sizeof job->where[k], "127.0.0.1:%d", sockets_free_port(AF_INET, NULL));
  for (int s = 0; s < SITES; s++)
    if ((sites[s] = fork()) == 0)
      run_site(job, s);
  while (in_exchange && !atomic_load(&job->waits))
    usleep(1000);
  if (in_exchange)
    kill(sites[victim], SIGKILL);
  cr_expect(WIFSIGNALED(end_of(sites[victim])), "%s", job->error[victim]);
  if ((sites[SITES] = fork()) == 0)
    restart_site(job);
  for (int s = 0; s <= SITES; s++)
    if (s != victim)
      cr_expect_eq(end_of(sites[s]), 0, "victim %d, process %d: %s", victim, s, job->error[s]);
  for (int s = 1; s < SITES; s++)
    cr_expect(job->checksum[s] == job->checksum[0] &&
                  memcmp(job->x[s], job->x[0], sizeof job->x[0]) == 0,
              "victim %d: site %d differs", victim, s);
  cr_log_info("%g from the optimum", sites_distance(job->x[0], SITES));
  cr_expect_lt(sites_distance(job->x[0], SITES), 6);
  munmap(job, sizeof *job);
}

/* While the others train, while they wait for it, and with drifts of two fragments on their way. */
Test(outer_sites_killed, the_others_go_on_and_it_comes_again) {
  onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, 1);
  kill_one(options, 0, 2 * SITES_H + 1, false);
  kill_one(options, 1, 3 * SITES_H, true);
  options.fragments = 2;
  options.delay = 3;
  kill_one(options, 2, 3 * SITES_H + 1, false);
}

/* Tests of sites that vanish and return. */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/support_outer.h"
#include "tests/support_ports.h"
#include "tests/support_transports.h"

/*
 * Tests holding back the messages of a site for a while, as if it had vanished. When the site
 * returns it must catch up. An error must end the training on all sites.
 */

/* --- Sites that vanish
 * ------------------------------------------------------------------------- */

/* A network in which messages from and to a site are held back while the site has vanished. A round
 * of all sites is one step of the network's clock. */
struct net {
  onebit_outer_options_t options;
  int rounds, gone_from, gone_until;
  atomic_bool gone[MAX_SITES];
  pthread_barrier_t clock;
  double distance[MAX_SITES];
  uint32_t checksum[MAX_SITES];
  uint64_t left_out[MAX_SITES], caught_up[MAX_SITES], skipped[MAX_SITES];
};

struct gate {
  onebit_transport_callbacks_t inner;
  struct net *net;
  int rank;
};

struct held {
  void *operation; /* NULL if the message is sent */
  int peer;
};

static int gate_send(void *context, const void *data, size_t bytes, int peer, int tag,
                     void **operation) {
  struct gate *gate = context;
  struct held *held = allocate(1, sizeof *held);
  held->peer = peer;
  *operation = held;
  return gate->inner.send(gate->inner.context, data, bytes, peer, tag, &held->operation);
}

static int gate_receive(void *context, void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  struct gate *gate = context;
  struct held *held = allocate(1, sizeof *held);
  held->peer = peer;
  *operation = held;
  return gate->inner.receive(gate->inner.context, data, bytes, peer, tag, &held->operation);
}

static int gate_test(void *context, void *operation, double seconds, size_t *bytes) {
  struct gate *gate = context;
  struct held *held = operation;
  if (gate->net->gone[gate->rank] || gate->net->gone[held->peer]) {
    const struct timespec nap = {0, (long)(seconds * 1e9)};
    nanosleep(&nap, NULL);
    return ONEBIT_IN_PROGRESS;
  }
  const int code =
      held->operation ? gate->inner.test(gate->inner.context, held->operation, seconds, bytes) : 0;
  if (code == 0)
    free(held);
  return code;
}

static void gate_cancel(void *context, void *operation) {
  struct gate *gate = context;
  struct held *held = operation;
  if (held->operation)
    gate->inner.cancel(gate->inner.context, held->operation);
  free(held);
}

static void gate_abort(void *context) {
  struct gate *gate = context;
  gate->inner.abort(gate->inner.context);
}

static const char *gate_message(void *context, int code) {
  struct gate *gate = context;
  return gate->inner.message(gate->inner.context, code);
}

static void train_on_net(struct net *net, onebit_comm_t comm) {
  const int site = onebit_comm_rank(comm), sites = onebit_comm_size(comm);
  float p[SITES_ALL] = {0};
  onebit_outer_t outer = sites_make_alone(comm, p, &net->options, 0.05, 0);
  for (int step = 0; outer && step < net->rounds * SITES_H; step++) {
    pthread_barrier_wait(&net->clock);
    net->gone[sites - 1] = step >= net->gone_from * SITES_H && step < net->gone_until * SITES_H;
    pthread_barrier_wait(&net->clock);
    sites_train(p, site, 0.02f / (1 + (float)step / 40));
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  net->distance[site] = sites_distance_to_mean_target(p, sites);
  net->checksum[site] = outer_info(outer).checksum;
  net->left_out[site] = sites_of(outer).left_out;
  net->caught_up[site] = sites_of(outer).caught_up;
  onebit_outer_destroy(outer);
}

static void join_net(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                     void *context) {
  struct net *net = context;
  struct gate gate = {*callbacks, net, rank};
  onebit_transport_callbacks_t own = *callbacks;
  onebit_comm_t comm;
  own.context = &gate;
  own.send = gate_send;
  own.receive = gate_receive;
  own.test = gate_test;
  own.cancel = gate_cancel;
  own.abort = gate_abort;
  own.message = gate_message;
  own.release = NULL;
  if (CHECK_STATUS(onebit_comm_create_custom(&own, rank, size, &comm), ONEBIT_OK))
    train_on_net(net, comm);
  onebit_comm_destroy(comm);
}

static void run_all_sites(struct net *net, int sites) {
  pthread_barrier_init(&net->clock, NULL, (unsigned)sites);
  try_on_custom(sites, sites, (struct custom_fault){0}, join_net, net);
  pthread_barrier_destroy(&net->clock);
  checks_must_hold();
  for (int s = 1; s < sites; s++)
    cr_expect(net->checksum[s] == net->checksum[0] && net->distance[s] == net->distance[0],
              "site %d differs", s);
}

static void check_vanished_site(onebit_outer_rule_t rule, int bits, size_t delay, bool whole) {
  struct net net = {.options = sites_options(rule, bits), .rounds = 60};
  net.options.delay = delay;
  net.options.fragments = 1 + delay / 2;
  check_case("delay %zu", delay);
  run_all_sites(&net, 4);
  const double undisturbed = net.distance[0];
  net.gone_from = 15;
  net.gone_until = 27;
  run_all_sites(&net, 4);
  cr_log_info("rule %d, %d bits, delay %zu: %g from the optimum, undisturbed %g; %ju of 61 rounds "
              "without some site, %ju shards came whole",
              (int)rule, bits, delay, net.distance[0], undisturbed, (uintmax_t)net.left_out[0],
              (uintmax_t)net.caught_up[3]);
  cr_expect_geq(net.left_out[0], 10);
  cr_expect(whole ? net.caught_up[3] >= 3 : net.caught_up[3] == 0);
  /* Parameters of zero have a distance of 20. Without the site the optimum is a different one. */
  cr_expect_lt(net.distance[0], undisturbed + 0.5);
}

Test(outer_sites_gone, a_site_that_vanishes_comes_back) {
  check_vanished_site(ONEBIT_OUTER_MEAN, 1, 3, false);
  check_vanished_site(ONEBIT_OUTER_NESTEROV, 8, 0, true);
  check_vanished_site(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE, 2, true);
}

/* --- Wrong calls -------------------------------------------------------------------------------*/

static void check_skip_at_site(struct place *place, int site, onebit_comm_t comm,
                               onebit_comm_t between) {
  float p[SITES_ALL] = {0}, zero[SITES_ALL] = {0};
  onebit_outer_options_t options = place->options;
  options.local_steps = 1;
  onebit_outer_t outer = sites_make(comm, between, p, &options, FOR_EVER, 0);
  for (size_t i = 0; i < SITES_ALL; i++)
    p[i] = 3;
  if (site == 1)
    for (size_t i = 0; i < SITES_ALL; i++)
      p[i] = NAN;
  CHECK_STATUS(onebit_outer_step(outer, 1), site == 1 ? ONEBIT_SKIPPED : ONEBIT_OK);
  CHECK(p[5] == 3 && p[SITES_ALL - 1] == 3, "the mean of the others is %g", (double)p[5]);
  memcpy(p, zero, sizeof p);
  CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  CHECK(p[5] == 0 && p[SITES_ALL - 1] == 0, "then %g", (double)p[5]);
  CHECK(outer_info(outer).skipped == (site == 1), "counts");
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  onebit_outer_destroy(outer);
}

Test(outer_sites_gone, a_drift_that_is_no_number_is_left_out) {
  for (int ranks = 1; ranks <= 2; ranks++) {
    struct place *place =
        place_create(3, ranks, sites_options(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE));
    on_sites(place, check_skip_at_site);
    free(place);
  }
}

static void create_wrongly(struct place *place, int site, onebit_comm_t comm,
                           onebit_comm_t between) {
  const int rank = onebit_comm_rank(comm);
  float p[SITES_ALL] = {0};
  onebit_outer_t outer;
  onebit_tensor_t tensor = {.parameter = p, .count = SITES_ALL};
  onebit_sites_options_t sites = ONEBIT_SITES_OPTIONS_INIT;
  onebit_outer_options_t options = place->options;
#define CREATE(wanted)                                                                             \
  CHECK_STATUS(onebit_outer_create_sites(comm, between, &tensor, 1, &options, &sites, &outer),     \
               wanted)
  options.learning_rate = site == 1 ? 0.5 : 1;
  CREATE(rank == 0 ? ONEBIT_ERROR_MISMATCH : ONEBIT_ERROR_PEER);
  options.learning_rate = 1;
  sites.patience = site == 1 ? 3 : 4;
  CREATE(rank == 0 ? ONEBIT_ERROR_MISMATCH : ONEBIT_ERROR_PEER);
  sites.patience = 0;
  sites.quorum = site == 0 && rank == 1 ? 3 : 2;
  CREATE(site == 0 && rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
  sites.quorum = 2;
  options.fragments = 1 + (size_t)site;
  CREATE(rank == 0 ? ONEBIT_ERROR_MISMATCH : ONEBIT_ERROR_PEER);
  options.fragments = 1;
  options.delay = (size_t)site;
  CREATE(rank == 0 ? ONEBIT_ERROR_MISMATCH : ONEBIT_ERROR_PEER);
  options.delay = 0;
  options.block_size = ONEBIT_BLOCK_BUFFER;
  CREATE(ONEBIT_ERROR_UNSUPPORTED);
  options.block_size = 0;
  CREATE(ONEBIT_OK);
  CHECK(!sites_of(outer).late && sites_of(outer).patience == 10, "defaults");
  onebit_outer_destroy(outer);
}

Test(outer_sites_gone, what_differs_is_told_on_all_sites) {
  struct place *place = place_create(2, 2, sites_options(ONEBIT_OUTER_MEAN, 1));
  on_sites(place, create_wrongly);
  free(place);
}

/* Tests fewer elements than sites, no elements, and 16-bit parameters. */
static void run_odd_ends(struct place *place, int site, onebit_comm_t comm, onebit_comm_t between) {
  uint16_t p[2] = {0};
  onebit_tensor_t tensor = {.parameter = p};
  onebit_sites_options_t sites = {.size = sizeof sites, .patience = FOR_EVER};
  onebit_outer_options_t options = place->options;
  options.parameter_dtype = ONEBIT_BFLOAT16;
  for (tensor.count = 0; tensor.count <= 2; tensor.count++) {
    onebit_outer_t outer = NULL;
    p[0] = p[1] = 0;
    CHECK_STATUS(onebit_outer_create_sites(comm, between, &tensor, 1, &options, &sites, &outer),
                 ONEBIT_OK);
    for (int step = 1; step <= 2 * SITES_H; step++) {
      if (step == SITES_H)
        p[0] = site == 0 ? 0x4040 : 0; /* 3 on site 0, and 0 on the others */
      CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
    }
    CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
    CHECK(tensor.count == 0 || p[0] == 0x3f80, "it is %x", (unsigned)p[0]);
    onebit_outer_destroy(outer);
  }
}

Test(outer_sites_gone, odd_ends) {
  struct place *place = place_create(3, 2, sites_options(ONEBIT_OUTER_MEAN, ONEBIT_OUTER_DENSE));
  on_sites(place, run_odd_ends);
  free(place);
}

/* If the transport fails, training ends with an error on all sites, whichever call fails and
 * whenever it does. */
static void train_until_it_fails(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                                 void *context) {
  onebit_comm_t comm = NULL, self;
  onebit_outer_t outer = NULL;
  onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, 1);
  onebit_sites_options_t sites = {.size = sizeof sites, .patience = 0.02};
  float p[SITES_ALL] = {0};
  onebit_tensor_t tensor = {.parameter = p, .count = SITES_ALL};
  onebit_status_t status = onebit_comm_create_custom(callbacks, rank, size, &comm);
  (void)context;
  CHECK_STATUS(onebit_comm_create_self(&self), ONEBIT_OK);
  if (status == ONEBIT_OK)
    status = onebit_outer_create_sites(self, comm, &tensor, 1, &options, &sites, &outer);
  for (int step = 0; status == ONEBIT_OK && step < 5 * SITES_H; step++) {
    sites_train(p, rank, 0.05f);
    status = onebit_outer_step(outer, 1);
  }
  if (status == ONEBIT_OK)
    status = onebit_outer_synchronize(outer);
  CHECK(status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_MESSAGE ||
            status == ONEBIT_ERROR_PEER,
        "%s", onebit_status_string(status));
  if (outer)
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_ERROR_TRANSPORT);
  onebit_outer_destroy(outer);
  onebit_comm_destroy(comm);
  onebit_comm_destroy(self);
}

Test(outer_sites_gone, a_transport_that_fails_ends_all) {
  enum { CALLS = 33 };
  for (long at = 1; at <= CALLS; at++)
    for (int call = CUSTOM_SEND; call <= CUSTOM_RECEIVE && sample_has((size_t)at - 1, CALLS);
         call++) {
      check_case("call %d, number %ld", call, at);
      try_on_custom(3, 3, (struct custom_fault){(enum custom_call)call, 1, at, false, false},
                    train_until_it_fails, NULL);
      checks_must_hold();
    }
}

/*
 * Tests sites that are processes and exchange over sockets. When one site is killed, the others
 * notice it in their next exchange, however long their patience is, and continue without it. When
 * the killed site is started again, it joins them, and all end with the same parameters.
 */

enum { SITES = 3, ROUNDS = 20 };

/* The job is in memory that all processes share. */
struct job {
  onebit_outer_options_t options;
  int victim, last_step;      /* last_step: the last step that the victim begins */
  bool in_exchange;           /* true: the victim is killed while the others wait for it in an
                               * exchange; false: after it */
  atomic_int waits;           /* set by the victim when it is to be killed */
  char where[SITES][32];      /* ports: of all sites, of the remaining sites, of all sites again */
  char error[2 * SITES][400]; /* of each process; the last process is the restarted victim */
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

static void expect_status(struct site *site, onebit_status_t status, onebit_status_t wanted,
                          const char *call) {
  if (status == wanted)
    return;
  snprintf(site->job->error[site->process], sizeof site->job->error[0], "%s: %s, not %s; %.200s",
           call, onebit_status_string(status), onebit_status_string(wanted), onebit_last_error());
  _exit(1);
}

#define MUST(site, call, wanted) expect_status(site, call, wanted, #call)

static onebit_comm_t join_sites(struct site *site, int time, int rank, int ranks) {
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

static void create_outer(struct site *site, onebit_comm_t between) {
  onebit_tensor_t tensors[SITES_TENSORS];
  onebit_sites_options_t sites = {.size = sizeof sites, .patience = FOR_EVER};
  sites_list(tensors, site->p);
  MUST(site, onebit_comm_create_self(&site->alone), ONEBIT_OK);
  MUST(site,
       onebit_outer_create_sites(site->alone, between, tensors, SITES_TENSORS, &site->job->options,
                                 &sites, &site->outer),
       ONEBIT_OK);
}

static void move_outer(struct site *site, onebit_comm_t between) {
  MUST(site, onebit_outer_move(site->outer, between), ONEBIT_OK);
  onebit_comm_destroy(site->between);
  site->between = between;
}

static void train_site(struct site *site, int steps) {
  for (int step = 0; step < steps; step++) {
    sites_train(site->p, site->number, 0.02f);
    MUST(site, onebit_outer_step(site->outer, 1), ONEBIT_OK);
  }
}

static void train_until_killed(struct site *site) {
  struct job *job = site->job;
  train_site(site, job->last_step - job->in_exchange);
  if (!job->in_exchange)
    raise(SIGKILL);
  atomic_store(&job->waits, 1);
  pause();
}

/* Trains until a step fails. That is in the first exchange after the victim's last step. */
static void train_until_failure(struct site *site) {
  struct job *job = site->job;
  const int limit = (job->last_step / SITES_H + 2) * SITES_H;
  onebit_status_t status = ONEBIT_OK;
  for (int step = 0; status == ONEBIT_OK && step < limit; step++) {
    sites_train(site->p, site->number, 0.02f);
    status = onebit_outer_step(site->outer, 1);
  }
  MUST(site, status, ONEBIT_ERROR_TRANSPORT);
  move_outer(site, join_sites(site, 1, site->number - (site->number > job->victim), SITES - 1));
  train_site(site, 2 * SITES_H);
}

static void rejoin_and_finish(struct site *site) {
  struct job *job = site->job;
  onebit_outer_info_t info = {.size = sizeof info};
  move_outer(site, join_sites(site, 2, site->number, SITES));
  train_site(site, ROUNDS * SITES_H);
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
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends this process if the test fails */
  struct site site = {.job = job, .number = number, .process = number};
  site.between = join_sites(&site, 0, number, SITES);
  create_outer(&site, site.between);
  if (number == job->victim)
    train_until_killed(&site);
  train_until_failure(&site);
  rejoin_and_finish(&site);
}

static void restart_site(struct job *job) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct site site = {.job = job, .number = job->victim, .process = SITES};
  MUST(&site, onebit_comm_create_self(&site.between), ONEBIT_OK);
  create_outer(&site, site.between);
  rejoin_and_finish(&site);
}

static int wait_for_exit(pid_t process) {
  int status = 0;
  cr_assert_eq(waitpid(process, &status, 0), process);
  return status;
}

static void kill_site(onebit_outer_options_t options, int victim, int last_step, bool in_exchange) {
  struct job *job =
      mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t sites[SITES + 1];
  cr_assert(job != MAP_FAILED);
  *job = (struct job){
      .options = options, .victim = victim, .last_step = last_step, .in_exchange = in_exchange};
  for (int k = 0; k < SITES; k++)
    snprintf(job->where[k], sizeof job->where[k], "127.0.0.1:%d", port_reserve(AF_INET, NULL));
  for (int s = 0; s < SITES; s++)
    if ((sites[s] = fork()) == 0)
      run_site(job, s);
  while (in_exchange && !atomic_load(&job->waits))
    usleep(1000);
  if (in_exchange)
    kill(sites[victim], SIGKILL);
  cr_expect(WIFSIGNALED(wait_for_exit(sites[victim])), "%s", job->error[victim]);
  if ((sites[SITES] = fork()) == 0)
    restart_site(job);
  for (int s = 0; s <= SITES; s++)
    if (s != victim)
      cr_expect_eq(wait_for_exit(sites[s]), 0, "victim %d, process %d: %s", victim, s,
                   job->error[s]);
  for (int s = 1; s < SITES; s++)
    cr_expect(job->checksum[s] == job->checksum[0] &&
                  memcmp(job->x[s], job->x[0], sizeof job->x[0]) == 0,
              "victim %d: site %d differs", victim, s);
  cr_log_info("%g from the optimum", sites_distance_to_mean_target(job->x[0], SITES));
  cr_expect_lt(sites_distance_to_mean_target(job->x[0], SITES), 6);
  munmap(job, sizeof *job);
}

/* Kills a site while the others train, while they wait for it, and with two drifts in flight. */
Test(outer_sites_killed, the_others_go_on_and_it_comes_again) {
  onebit_outer_options_t options = sites_options(ONEBIT_OUTER_MEAN, 1);
  kill_site(options, 0, 2 * SITES_H + 1, false);
  kill_site(options, 1, 3 * SITES_H, true);
  options.fragments = 2;
  options.delay = 3;
  kill_site(options, 2, 3 * SITES_H + 1, false);
}

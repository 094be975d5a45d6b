/*
 * Tests many optimizer steps with faults between them: wrong calls, gradients that are not finite,
 * calls on a busy optimizer, late ranks, optimizers that are saved and created again, and failed
 * allocations. Every result, and the state at the end, must have the bits of a run without faults,
 * and memory must not grow. ONEBIT_TEST_CALLS is the number of steps; `make check-long` makes more
 * than `make check`.
 *
 * A seeded generator draws the faults. It is the same on all ranks, so each rank knows which fault
 * the other ranks will make.
 */
#include <malloc.h>

#define TEST_SECONDS 7200
#include "base/hash.h"
#include "base/memory.h"
#include "tests/support.h"
#include "tests/support_statistics.h"

static uint64_t steps_wanted(void) {
  const char *text = getenv("ONEBIT_TEST_CALLS");
  return text ? strtoull(text, NULL, 10) : 800;
}

enum long_fault {
  LONG_WRONG_ARGUMENT, /* on one rank; all ranks get an error */
  LONG_WRONG_HANDLE,   /* on one rank, and only this rank gets an error */
  LONG_MISMATCH,       /* the ranks pass different numbers */
  LONG_NOT_FINITE,     /* in the input of one rank; all ranks skip the step */
  LONG_BUSY,           /* calls refused because of a request in flight or an open step */
  LONG_LATE,           /* one rank sleeps for some milliseconds */
  LONG_MADE_AGAIN,     /* objects are destroyed and created again from exported or saved state */
  LONG_NO_MEMORY,      /* creating another object fails: one rank has no memory for it */
  LONG_FAULTS
};

enum { LONG_RANKS = 4, LONG_VALUES = 4096, LONG_ITEMS = 16 };

struct long_run {
  uint64_t calls, every; /* calls per rank; about one in `every` has a fault; 0: none */
  pthread_barrier_t barrier;
  float values[LONG_RANKS][LONG_VALUES]; /* inputs are parts of these */
  /* `hash` covers all results of calls; `state` covers the state at the end. */
  uint64_t hash[LONG_RANKS][LONG_ITEMS], state[LONG_RANKS][LONG_ITEMS];
  uint64_t faults[LONG_FAULTS];   /* counted by rank 0, and the same on all ranks */
  size_t bytes_early, bytes_late; /* allocated bytes after a tenth of the calls and after all
                                   * calls */
  unsigned char *alone;           /* for each call: true if it sends nothing; the run without faults
                                   * sets it */
  const void *parts[LONG_RANKS];
  size_t part_bytes[LONG_RANKS];
};

/* A rank's own state in a run. */
struct long_rank {
  struct long_run *run;
  onebit_comm_t comm;
  int rank;
  uint64_t drawn, next_fault;
};

/* The growth of memory that is allowed. Memory that malloc caches for threads, here about 60 kB
 * however long a run is, counts as in use. */
#define CACHED ((size_t)128 << 10)

/* Mixes the bits of a number as splitmix64 does. */
static uint64_t mix_bits(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static struct long_run *long_create(uint64_t calls, uint64_t every) {
  struct long_run *run = allocate(1, sizeof *run);
  run->calls = calls;
  run->every = every;
  run->alone = allocate(calls, 1);
  pthread_barrier_init(&run->barrier, NULL, LONG_RANKS);
  for (int r = 0; r < LONG_RANKS; r++)
    for (size_t i = 0; i < LONG_VALUES; i++)
      run->values[r][i] = input_value(i, r, 0);
  return run;
}

static void long_destroy(struct long_run *run) {
  pthread_barrier_destroy(&run->barrier);
  free(run->alone);
  free(run);
}

/* Draws a number below `limit`. All ranks draw the same number. */
static uint64_t long_draw(struct long_rank *self, uint64_t limit) {
  return mix_bits(self->drawn++) % limit;
}

static struct long_rank long_begin(struct long_run *run, onebit_comm_t comm) {
  struct long_rank self = {.run = run, .comm = comm, .rank = onebit_comm_rank(comm)};
  self.next_fault = run->every ? long_draw(&self, 2 * run->every) : UINT64_MAX;
  return self;
}

/* Returns true if a fault is due before this call. Sets which fault it is, and whether this rank
 * makes it. */
static bool long_is_due(struct long_rank *self, uint64_t call, enum long_fault *fault, bool *mine) {
  if (call != self->next_fault)
    return false;
  self->next_fault += 1 + long_draw(self, 2 * self->run->every - 1);
  *fault = (enum long_fault)long_draw(self, LONG_FAULTS);
  *mine = (int)long_draw(self, LONG_RANKS) == self->rank;
  check_case("call %llu, fault %d", (unsigned long long)call, (int)*fault);
  if (self->rank == 0)
    self->run->faults[*fault]++;
  return true;
}

/* Returns this rank's input: `count` values that differ by call. */
static const float *long_input(const struct long_rank *self, uint64_t call, size_t count) {
  return &self->run->values[self->rank][mix_bits(call) % (LONG_VALUES - count)];
}

static void long_wait(struct long_rank *self) { pthread_barrier_wait(&self->run->barrier); }

/* Stores the memory in use after a tenth of the calls and after all calls. */
static void long_note_memory(struct long_rank *self, uint64_t call) {
  bool early = call == self->run->calls / 10, late = call + 1 == self->run->calls;
  if (!early && !late)
    return;
  long_wait(self);
  if (self->rank == 0)
    *(early ? &self->run->bytes_early : &self->run->bytes_late) = mallinfo2().uordblks;
  long_wait(self);
}

/* Calls `create` on all ranks while an allocation fails on the rank whose `mine` is true. Checks
 * that `create` succeeds on all ranks or fails on all. */
static void long_without_memory(struct long_rank *self, bool mine,
                                bool (*create)(onebit_comm_t comm)) {
  long fails_at = 1 + (long)long_draw(self, 60);
  long_wait(self);
  if (mine)
    ob_memory_fail_at(fails_at);
  long_wait(self);
  bool made = create(self->comm);
  long_wait(self);
  if (mine)
    ob_memory_fail_at(0);
  self->run->state[self->rank][0] = made;
  long_wait(self);
  for (int r = 0; r < LONG_RANKS; r++)
    CHECK(self->run->state[r][0] == made, "rank %d fared otherwise", r);
  long_wait(self);
}

/* Sleeps for up to five milliseconds if `mine` is true. */
static void long_be_late(struct long_rank *self, bool mine) {
  struct timespec time = {0, 1000 * (long)long_draw(self, 5000)};
  if (mine)
    nanosleep(&time, NULL);
}

static const char *const names[] = {"wrong argument", "wrong handle", "mismatch",   "not finite",
                                    "busy",           "late",         "made again", "no memory"};

/* Checks that both runs ended in the same state, and prints the counts of faults. */
static void long_compare(const struct long_run *plain, const struct long_run *faulty) {
  uint64_t faults = 0;
  for (int r = 0; r < LONG_RANKS; r++)
    for (int k = 0; k < LONG_ITEMS; k++) {
      CHECK(plain->hash[r][k] == faulty->hash[r][k], "results of %d differ on rank %d", k, r);
      CHECK(plain->state[r][k] == faulty->state[r][k], "what %d left differs on rank %d", k, r);
    }
  fprintf(stderr, "%llu steps on %d ranks", (unsigned long long)faulty->calls, LONG_RANKS);
  for (int f = 0; f < LONG_FAULTS; f++) {
    fprintf(stderr, ", %s %llu", names[f], (unsigned long long)faulty->faults[f]);
    faults += faulty->faults[f];
    CHECK(faulty->faults[f] > 0, "no fault \"%s\"", names[f]);
  }
  fprintf(stderr, ": %llu faults; %zu bytes in use after a tenth of them, %zu after all\n",
          (unsigned long long)faults, faulty->bytes_early, faulty->bytes_late);
  size_t early = faulty->bytes_early, late = faulty->bytes_late;
  CHECK(late <= early + CACHED, "memory grew from %zu to %zu bytes", early, late);
  checks_must_hold();
}

/* --- Steps -------------------------------------------------------------------------------------*/

/* Every optimizer goes through its two or three stages, because its warm-up ends early. */
static const struct any_case trained[] = {
    {ANY(efficient_adam, .gain = 1)},
    {ANY(adam, .freeze_step = 20)},
    {ANY(lamb, .freeze_step = 30)},
    {ANY(zero_one_adam, .variance_update_scaler = 2, .variance_freeze_step = 60,
         .local_step_scaler = 20, .local_step_clipper = 4)},
    {ANY(lion, .beta1 = 0.9)},
    {ANY(momentum, .warmup_steps = 10)}};
enum { TRAINED = sizeof trained / sizeof trained[0], TENSORS = 3, ELEMENTS = 296 };
static const size_t elements[TENSORS] = {65, 200, 31};

struct learner {
  onebit_optimizer_t optimizer;
  onebit_tensor_t tensors[TENSORS];
  float parameters[ELEMENTS];
  uint64_t local; /* number of steps so far that sent nothing */
};

struct trainer {
  struct long_rank self;
  struct learner learner[TRAINED];
};

static onebit_status_t create_optimizer(onebit_comm_t comm, size_t k, struct learner *learner) {
  struct any_options options = any_options_of(trained[k].method, trained[k].options);
  return any_create(&options, comm, learner->tensors, TENSORS, &learner->optimizer);
}

static void set_tensors(struct learner *learner) {
  float *at = learner->parameters;
  for (size_t t = 0; t < TENSORS; at += elements[t++])
    learner->tensors[t] = (onebit_tensor_t){
        .parameter = at, .count = elements[t], .weight_decay = 0.01F, .uncompressed = t == 2};
}

static bool create_learner(onebit_comm_t comm) {
  struct learner learner = {0};
  set_tensors(&learner);
  onebit_status_t status = create_optimizer(comm, 1, &learner);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "an optimizer: %s",
        onebit_last_error());
  if (status == ONEBIT_OK)
    onebit_optimizer_destroy(learner.optimizer);
  return status == ONEBIT_OK;
}

static void set_gradients(struct trainer *trainer, struct learner *learner, uint64_t call) {
  for (size_t t = 0; t < TENSORS; t++)
    CHECK_STATUS(
        onebit_optimizer_set_gradient(learner->optimizer, t,
                                      long_input(&trainer->self, call * TENSORS + t, elements[t])),
        ONEBIT_OK);
}

static const float rate = 0.001F;

/* Checks that the step fails on all ranks and changes nothing. */
static void check_step_refused(struct learner *learner, float given, onebit_status_t wanted) {
  float before[ELEMENTS];
  memcpy(before, learner->parameters, sizeof before);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, given), wanted);
  CHECK(memcmp(before, learner->parameters, sizeof before) == 0, "a step that failed has moved");
}

static void step_not_finite(struct learner *learner, bool mine) {
  static const float bad[200] = {[77] = INFINITY};
  if (mine)
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, 1, bad), ONEBIT_OK);
  check_step_refused(learner, rate, ONEBIT_SKIPPED);
}

/* Makes the step in parts. Calls that are not allowed before the end of the step are refused. */
static void step_busy(struct learner *learner) {
  onebit_optimizer_t optimizer = learner->optimizer;
  char part[8];
  size_t bytes;
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 1), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_check(optimizer, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_save(optimizer, part, sizeof part, &bytes), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_step(optimizer, rate), ONEBIT_OK);
}

/* Saves the optimizer to memory, destroys it, creates another one with other parameters, and loads
 * the saved state. */
static void load_again(struct trainer *trainer, size_t k) {
  struct learner *learner = &trainer->learner[k];
  struct long_run *run = trainer->self.run;
  int rank = trainer->self.rank;
  size_t bytes = 0;
  CHECK_STATUS(onebit_optimizer_save(learner->optimizer, NULL, 0, &bytes), ONEBIT_OK);
  void *part = allocate(bytes, 1);
  CHECK_STATUS(onebit_optimizer_save(learner->optimizer, part, bytes, &bytes), ONEBIT_OK);
  run->parts[rank] = part;
  run->part_bytes[rank] = bytes;
  onebit_optimizer_destroy(learner->optimizer);
  memset(learner->parameters, 0, sizeof learner->parameters);
  CHECK_STATUS(create_optimizer(trainer->self.comm, k, learner), ONEBIT_OK);
  long_wait(&trainer->self);
  CHECK_STATUS(onebit_optimizer_load(learner->optimizer, run->parts, run->part_bytes, LONG_RANKS),
               ONEBIT_OK);
  long_wait(&trainer->self);
  free(part);
}

/* True for faults that a step's messages report to all ranks. If a step sends nothing, the other
 * ranks are not told of its error. */
static bool is_sent_to_all(enum long_fault fault) {
  return fault == LONG_WRONG_ARGUMENT || fault == LONG_MISMATCH || fault == LONG_NOT_FINITE;
}

/* Makes a step with the fault, and returns whether the step succeeds. */
static bool step_with_fault(struct trainer *trainer, size_t k, enum long_fault fault, bool mine) {
  struct learner *learner = &trainer->learner[k];
  void *comm = trainer->self.comm;
  switch (fault) {
  case LONG_WRONG_ARGUMENT:
    check_step_refused(learner, mine ? NAN : rate,
                       mine ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    break;
  case LONG_MISMATCH:
    check_step_refused(learner, mine ? 2 * rate : rate, ONEBIT_ERROR_MISMATCH);
    break;
  case LONG_NOT_FINITE:
    step_not_finite(learner, mine);
    break;
  case LONG_BUSY:
    step_busy(learner);
    return true;
  case LONG_LATE:
    long_be_late(&trainer->self, mine);
    break;
  case LONG_MADE_AGAIN:
    load_again(trainer, k);
    break;
  case LONG_NO_MEMORY:
    long_without_memory(&trainer->self, mine, create_learner);
    break;
  default:
    CHECK_STATUS(onebit_optimizer_step(comm, rate), ONEBIT_ERROR_ARGUMENT);
  }
  return false;
}

/* True if the same step of the run without faults sent nothing. */
static bool was_alone(struct learner *learner) {
  const onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
  bool alone = info.exchanges[2] > learner->local;
  learner->local = info.exchanges[2];
  return alone;
}

static void step_once(struct trainer *trainer, uint64_t call) {
  struct long_rank *self = &trainer->self;
  struct long_run *run = self->run;
  size_t k = call % TRAINED;
  struct learner *learner = &trainer->learner[k];
  enum long_fault fault;
  bool mine, made = false;
  set_gradients(trainer, learner, call);
  if (long_is_due(self, call, &fault, &mine) && !(run->alone[call] && is_sent_to_all(fault))) {
    made = step_with_fault(trainer, k, fault, mine);
    if (!made)
      set_gradients(trainer, learner, call);
  }
  if (!made)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, rate), ONEBIT_OK);
  if (!run->every && trained[k].method == &ob_method_zero_one_adam && was_alone(learner) &&
      self->rank == 0)
    run->alone[call] = 1;
  uint64_t *hash = &run->hash[self->rank][k];
  *hash = ob_hash(*hash, learner->parameters, sizeof learner->parameters);
  long_note_memory(self, call);
}

/* Hashes norms of the state. The norms differ if any part of the state differs. */
static uint64_t hash_state(onebit_optimizer_t optimizer) {
  uint64_t hash = OB_HASH_START;
  for (size_t t = 0; t < TENSORS; t++) {
    const onebit_tensor_statistics_t told = tensor_statistics(optimizer, t);
    const double norms[] = {told.momentum_norm, told.residual_norm, told.parameter_norm};
    hash = ob_hash(hash, norms, sizeof norms);
  }
  return hash;
}

static void step_all(onebit_comm_t comm, void *context) {
  struct trainer *trainer = allocate(1, sizeof *trainer);
  struct long_run *run = context;
  trainer->self = long_begin(run, comm);
  for (size_t k = 0; k < TRAINED; k++) {
    set_tensors(&trainer->learner[k]);
    for (size_t i = 0; i < ELEMENTS; i++)
      trainer->learner[k].parameters[i] = input_value(i, 0, (int)k);
    CHECK_STATUS(create_optimizer(comm, k, &trainer->learner[k]), ONEBIT_OK);
  }
  for (uint64_t call = 0; call < run->calls; call++)
    step_once(trainer, call);
  for (size_t k = 0; k < TRAINED; k++) {
    run->state[trainer->self.rank][k] = hash_state(trainer->learner[k].optimizer);
    onebit_optimizer_destroy(trainer->learner[k].optimizer);
  }
  free(trainer);
}

/* The number of faults must be the expected one: one in 100 steps, from 10^4 steps on. */
Test(long_faults, steps_end_as_without) {
  const uint64_t steps = steps_wanted();
  struct long_run *plain = long_create(steps, 0),
                  *faulty = long_create(steps, steps < 10000 ? steps / 200 + 1 : 100);
  on_hosts(LONG_RANKS, 2, step_all, plain);
  memcpy(faulty->alone, plain->alone, steps);
  on_hosts(LONG_RANKS, 2, step_all, faulty);
  long_compare(plain, faulty);
  long_destroy(plain);
  long_destroy(faulty);
}

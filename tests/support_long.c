/* Long runs with faults: draws, counts, memory and the comparison. */
#include "tests/support_long.h"

#include <malloc.h>

#include "base/memory.h"

/* The memory that malloc keeps for threads counts as in use: some 60 kB here, however long a run
 * is. */
#define CACHED ((size_t)128 << 10)

/* splitmix64's mixing. */
static uint64_t mixed(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

struct long_run *long_create(uint64_t calls, uint64_t every) {
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

void long_destroy(struct long_run *run) {
  pthread_barrier_destroy(&run->barrier);
  free(run->alone);
  free(run);
}

uint64_t long_draw(struct long_rank *self, uint64_t limit) { return mixed(self->drawn++) % limit; }

struct long_rank long_begin(struct long_run *run, onebit_comm_t comm) {
  struct long_rank self = {.run = run, .comm = comm, .rank = onebit_comm_rank(comm)};
  self.next_fault = run->every ? long_draw(&self, 2 * run->every) : UINT64_MAX;
  return self;
}

bool long_is_due(struct long_rank *self, uint64_t call, enum long_fault *fault, bool *mine) {
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

const float *long_input(const struct long_rank *self, uint64_t call, size_t count) {
  return &self->run->values[self->rank][mixed(call) % (LONG_VALUES - count)];
}

void long_note_memory(struct long_rank *self, uint64_t call) {
  bool early = call == self->run->calls / 10, late = call + 1 == self->run->calls;
  if (!early && !late)
    return;
  long_wait(self);
  if (self->rank == 0)
    *(early ? &self->run->bytes_early : &self->run->bytes_late) = mallinfo2().uordblks;
  long_wait(self);
}

void long_without_memory(struct long_rank *self, bool mine, bool (*create)(onebit_comm_t comm)) {
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

void long_wait(struct long_rank *self) { pthread_barrier_wait(&self->run->barrier); }

void long_be_late(struct long_rank *self, bool mine) {
  struct timespec time = {0, 1000 * (long)long_draw(self, 5000)};
  if (mine)
    nanosleep(&time, NULL);
}

static const char *const names[] = {"wrong argument", "wrong handle", "mismatch",   "not finite",
                                    "busy",           "late",         "made again", "no memory"};

void long_compare(const char *what, const struct long_run *plain, const struct long_run *faulty) {
  uint64_t faults = 0;
  for (int r = 0; r < LONG_RANKS; r++)
    for (int k = 0; k < LONG_ITEMS; k++) {
      CHECK(plain->hash[r][k] == faulty->hash[r][k], "%s: results of %d differ on rank %d", what, k,
            r);
      CHECK(plain->state[r][k] == faulty->state[r][k], "%s: what %d left differs on rank %d", what,
            k, r);
    }
  fprintf(stderr, "%llu %s on %d ranks", (unsigned long long)faulty->calls, what, LONG_RANKS);
  for (int f = 0; f < LONG_FAULTS; f++) {
    fprintf(stderr, ", %s %llu", names[f], (unsigned long long)faulty->faults[f]);
    faults += faulty->faults[f];
    CHECK(faulty->faults[f] > 0, "%s: no fault \"%s\"", what, names[f]);
  }
  fprintf(stderr, ": %llu faults; %zu bytes in use after a tenth of them, %zu after all\n",
          (unsigned long long)faults, faulty->bytes_early, faulty->bytes_late);
  size_t early = faulty->bytes_early, late = faulty->bytes_late;
  CHECK(late <= early + CACHED, "%s: memory grew from %zu to %zu bytes", what, early, late);
  checks_must_hold();
}

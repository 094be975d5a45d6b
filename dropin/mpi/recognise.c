/* Verdicts on tensors. */
#include "dropin/mpi/recognise.h"

#include <stdlib.h>
#include <string.h>

#include "dropin/mpi/queue.h"

/* A refused tensor is watched again after so many dense calls, then after four times as many, and a
 * third time; what one look finds beyond doubt is not looked at again. */
enum { FIRST_WAIT = 64, MAX_REFUSALS = 4 };

/* One that was slower compressed is tried again after so many calls, and after twice as many. */
enum { SLOWER_WAIT = 1024, MAX_WAIT = 1 << 20 };

/* Of a compressed tensor the calls that begin a look: 16, 64, 256, and then each 256. */
enum { LOOKS = 256 };

/* From so many on a look that finds nothing makes up for a refusal. */
enum { FORGIVING = 1024 };

static void enter(struct ob_candidate *candidate, enum ob_candidate_state state) {
  candidate->state = state;
  candidate->calls = 0;
  ob_watch_destroy(candidate->watch);
  candidate->watch = NULL;
}

void ob_candidate_reset(struct ob_candidate *candidate) {
  ob_watch_destroy(candidate->watch);
  *candidate = (struct ob_candidate){.state = OB_CANDIDATE_WATCHED};
}

/* ---- Refusing ---- */

static bool is_final(enum ob_finding finding) { return finding == OB_FINDING_INTEGER; }

static void refuse(struct ob_candidate *candidate, enum ob_finding finding,
                   struct ob_record *record) {
  candidate->refusals++;
  candidate->reason = OB_REASON_UNLIKE;
  candidate->wait = is_final(finding) || candidate->refusals >= MAX_REFUSALS
                        ? 0u
                        : (unsigned)FIRST_WAIT << 2 * (candidate->refusals - 1);
  ob_record_finding(record, (int)finding);
  enter(candidate, OB_CANDIDATE_DENSE);
}

void ob_candidate_lose(struct ob_candidate *candidate) {
  candidate->reason = OB_REASON_WITHDRAWN;
  candidate->wait = FIRST_WAIT;
  enter(candidate, OB_CANDIDATE_DENSE);
}

static void slow_down(struct ob_candidate *candidate) {
  candidate->wait =
      candidate->was_slower && candidate->wait < MAX_WAIT ? 2 * candidate->wait : SLOWER_WAIT;
  candidate->was_slower = true;
  candidate->reason = OB_REASON_SLOWER;
  enter(candidate, OB_CANDIDATE_DENSE);
}

static void accept(struct ob_candidate *candidate) {
  candidate->is_restarted = true;
  candidate->timed[true] = 0;
  enter(candidate, OB_CANDIDATE_COMPRESSED);
}

/* ---- Seconds ---- */

void ob_candidate_time(struct ob_candidate *candidate, bool compressed, double seconds) {
  if (candidate)
    candidate->seconds[compressed][candidate->timed[compressed]++ % OB_CLOCK_SAMPLES] = seconds;
}

static int by_size(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

/* Nanoseconds of a call, the mean without the fastest and the slowest eighth; -1 where too few
 * are known. A rank that waits now and then for another's processor loses that time, too, which a
 * median would not show. */
static int64_t nanoseconds(const struct ob_candidate *candidate, bool compressed) {
  double sorted[OB_CLOCK_SAMPLES];
  if (candidate->timed[compressed] < OB_CLOCK_SAMPLES)
    return -1;
  memcpy(sorted, candidate->seconds[compressed], sizeof sorted);
  qsort(sorted, OB_CLOCK_SAMPLES, sizeof *sorted, by_size);
  const int cut = OB_CLOCK_SAMPLES / 8;
  double sum = 0;
  for (int i = cut; i < OB_CLOCK_SAMPLES - cut; i++)
    sum += sorted[i];
  return (int64_t)(sum / (OB_CLOCK_SAMPLES - 2 * cut) * 1e9);
}

/* ---- Agreeing ---- */

struct verdict {
  enum ob_finding finding;
  bool slower; /* of the slowest rank's calls; one that was slower before must gain a tenth */
};

/* Collective. Ranks that are not at the same tensor refuse it. */
static struct verdict agree(const struct ob_candidate *candidate, MPI_Comm comm, int64_t hash,
                            enum ob_finding finding) {
  int64_t all[] = {finding, hash, -hash, nanoseconds(candidate, false),
                   nanoseconds(candidate, true)};
  if (ob_largest(comm, all, 5) != MPI_SUCCESS || all[1] != -all[2])
    return (struct verdict){.finding = OB_FINDING_UNSEEN};
  int64_t bound = candidate->was_slower ? all[3] / 10 * 9 : all[3];
  return (struct verdict){(enum ob_finding)all[0], all[3] > 0 && all[4] > 0 && all[4] >= bound};
}

/* ---- Looking ---- */

static void add(struct ob_candidate *candidate, const struct ob_mpi_call *call,
                onebit_dtype_t dtype) {
  const void *input = call->sendbuf == MPI_IN_PLACE ? call->recvbuf : call->sendbuf;
  ob_watch_add(candidate->watch, dtype, input, call->count);
}

static enum ob_finding find(const struct ob_candidate *candidate, struct ob_candidate *next,
                            unsigned calls) {
  enum ob_finding finding = ob_watch_judge(candidate->watch, calls);
  bool related = next && ob_watch_related(candidate->watch, next->watch);
  if (related)
    next->is_related = true;
  related = related || candidate->is_related;
  return related && finding < OB_FINDING_RELATED ? OB_FINDING_RELATED : finding;
}

static enum ob_reason watch(struct ob_candidate *candidate, struct ob_candidate *next,
                            const struct ob_mpi_call *call, onebit_dtype_t dtype, int64_t hash,
                            struct ob_record *record) {
  if (candidate->calls == 0)
    candidate->watch = ob_watch_create();
  add(candidate, call, dtype);
  if (++candidate->calls < OB_WATCH_CALLS)
    return OB_REASON_WATCHING;
  struct verdict verdict =
      agree(candidate, call->comm, hash, find(candidate, next, OB_WATCH_CALLS));
  candidate->is_related = false;
  if (verdict.finding == OB_FINDING_NONE)
    accept(candidate);
  else
    refuse(candidate, verdict.finding, record);
  return OB_REASON_WATCHING;
}

static bool begins_look(unsigned calls) {
  return calls == 16 || calls == 64 || (calls && calls % LOOKS == 0);
}

/* The call that ends a look may be the first that is dense again. */
static enum ob_reason look_again(struct ob_candidate *candidate, const struct ob_mpi_call *call,
                                 onebit_dtype_t dtype, int64_t hash, struct ob_record *record) {
  unsigned calls = candidate->calls++;
  if (begins_look(calls) && !candidate->watch)
    candidate->watch = ob_watch_create();
  add(candidate, call, dtype);
  if (calls < OB_WATCH_AGAIN || !begins_look(calls - OB_WATCH_AGAIN + 1))
    return OB_REASON_NONE;
  struct verdict verdict =
      agree(candidate, call->comm, hash, ob_watch_judge(candidate->watch, OB_WATCH_AGAIN));
  ob_watch_destroy(candidate->watch);
  candidate->watch = NULL;
  if (verdict.finding != OB_FINDING_NONE)
    refuse(candidate, verdict.finding, record);
  else if (verdict.slower)
    slow_down(candidate);
  else if (candidate->refusals && calls >= FORGIVING)
    candidate->refusals--;
  return candidate->state == OB_CANDIDATE_COMPRESSED ? OB_REASON_NONE : candidate->reason;
}

static enum ob_reason wait(struct ob_candidate *candidate) {
  enum ob_reason reason = candidate->reason;
  if (!candidate->wait || ++candidate->calls < candidate->wait)
    return reason;
  if (reason == OB_REASON_UNLIKE)
    enter(candidate, OB_CANDIDATE_WATCHED);
  else
    accept(candidate);
  return reason;
}

enum ob_reason ob_candidate_judge(struct ob_candidate *candidate, struct ob_candidate *next,
                                  const struct ob_mpi_call *call, onebit_dtype_t dtype,
                                  int64_t hash, struct ob_record *record) {
  switch (candidate->state) {
  case OB_CANDIDATE_WATCHED:
    return watch(candidate, next, call, dtype, hash, record);
  case OB_CANDIDATE_COMPRESSED:
    return look_again(candidate, call, dtype, hash, record);
  case OB_CANDIDATE_DENSE:
    return wait(candidate);
  }
  return OB_REASON_UNLIKE;
}

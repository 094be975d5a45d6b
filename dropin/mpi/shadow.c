/* Compares a part of a compressed sum with the exact sum. */
#include "dropin/mpi/communicator.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "dropin/elements.h"
#include "dropin/mpi/exchange.h"

/* The first FIRST_SHADOWS calls of a tensor each have a shadow, a comparison with the exact sum.
 * After that, on average one of BETWEEN calls has a shadow. A hash of the call's number selects it,
 * so that no period of the program avoids the shadows. */
enum { FIRST_SHADOWS = 16, BETWEEN = 16 };

/* The compared part is an eighth of the tensor, but at most MAX_PART elements. It consists of
 * blocks of BLOCK elements, each with one scale. */
enum { BLOCK = 2048, MAX_PART = 8 * BLOCK };

static size_t shadow_part_size(size_t count) {
  size_t part = count / 8 / BLOCK * BLOCK;
  part = part < BLOCK ? BLOCK : part > MAX_PART ? MAX_PART : part;
  return part < count ? part : count;
}

size_t ob_shadow_bytes(const struct ob_mpi_call *call) {
  return call->operation == ONEBIT_ALLREDUCE ? shadow_part_size(call->count) * sizeof(double) : 0;
}

static onebit_dtype_t shadow_dtype(const struct ob_mpi_call *call) {
  onebit_dtype_t dtype;
  bool sum;
  ob_mpi_call_resolve(call, &dtype, &sum);
  return dtype;
}

bool ob_shadow_begin(struct ob_shadow *shadow, const struct ob_mpi_call *call) {
  if (call->operation != ONEBIT_ALLREDUCE)
    return false;
  uint64_t number = shadow->calls++;
  uint64_t random = ob_hash(OB_HASH_START, &number, sizeof number) >> 8;
  if (number >= FIRST_SHADOWS && random % BETWEEN != 0)
    return false;
  const size_t size = ob_elements_size(shadow_dtype(call)), part = shadow_part_size(call->count);
  const void *input = call->sendbuf == MPI_IN_PLACE ? call->recvbuf : call->sendbuf;
  shadow->first = (size_t)(random / BETWEEN) % ((call->count - part) / BLOCK + 1) * BLOCK;
  memcpy(shadow->input, (const char *)input + shadow->first * size, part * size);
  return true;
}

/* ---- Comparing ---- */

struct difference {
  double error, norm; /* squared norms: of the difference, and of the exact sum */
};

static struct difference shadow_compare(onebit_dtype_t dtype, const char *sum, const char *exact,
                                        size_t count) {
  enum { TOGETHER = 256 };
  float a[TOGETHER], b[TOGETHER];
  struct difference found = {0, 0};
  for (size_t first = 0; first < count; first += TOGETHER) {
    size_t elements = count - first < TOGETHER ? count - first : TOGETHER;
    size_t at = first * ob_elements_size(dtype);
    ob_elements_read(dtype, a, sum + at, elements);
    ob_elements_read(dtype, b, exact + at, elements);
    for (size_t i = 0; i < elements; i++) {
      double error = (double)a[i] - (double)b[i];
      found.error += error * error;
      found.norm += (double)b[i] * (double)b[i];
    }
  }
  return found;
}

/* A call is quiet if the norm of its input is below QUIET times that of the previous call. The
 * factor corresponds to the bounds of is_refused below. */
#define QUIET (1.0 / 13)

bool ob_shadow_is_quiet(struct ob_shadow *shadow, const struct ob_mpi_call *call) {
  const void *input = call->sendbuf == MPI_IN_PLACE ? call->recvbuf : call->sendbuf;
  double before = shadow->norm;
  shadow->norm =
      shadow_compare(shadow_dtype(call), input, input, shadow_part_size(call->count)).norm;
  return shadow->norm < QUIET * QUIET * before;
}

/* Returns the largest allowed difference of a sum, relative to the sum's norm. It is over three
 * times the difference that was measured with calls of one magnitude: 0.037, 0.18, 0.5 and 1.2 for
 * 8, 4, 2 and 1 bits (tests/preload/streams sgd). */
static double shadow_bound(int bits) {
  return bits == 0 ? INFINITY : bits >= 8 ? 0.125 : bits >= 4 ? 0.6 : bits >= 2 ? 1.6 : 4;
}

/* A tensor is refused after MAX_OFFENCES of AMONG comparisons are beyond the bound, or after one is
 * beyond MAX_BOUNDS times the bound. A single comparison beyond the bound may be chance, after an
 * outlier among gradients. */
enum { MAX_OFFENCES = 2, MAX_BOUNDS = 4, AMONG = 64 };

static bool is_refused(struct ob_shadow *shadow, double ratio, double bound) {
  shadow->since = ratio > bound ? 0 : shadow->since + 1;
  shadow->offences = shadow->since > AMONG ? 0 : shadow->offences + (ratio > bound);
  return ratio > MAX_BOUNDS * bound || shadow->offences >= MAX_OFFENCES;
}

static void shadow_warn(const struct ob_mpi_call *call, int tensor, int bits, double ratio,
                        double bound) {
  int rank = 0;
  PMPI_Comm_rank(call->comm, &rank);
  if (rank == 0)
    fprintf(
        stderr,
        "onebit: warning: tensor %d (allreduce of %zu elements) is no longer compressed: a "
        "compressed sum differed from the exact sum by %.0f %% of its norm, but error feedback "
        "keeps gradients within %.0f %%. The tensor's sums so far are approximate. %sIf the tensor "
        "is not a gradient, exclude it by a rule (pass allreduce count=%zu) and run again\n",
        tensor, call->count, 100 * ratio, 100 * bound,
        bits < 8 ? "If it is a gradient that changes its size quickly, send 8 bits. " : "",
        call->count);
}

void ob_shadow_end(struct ob_shadow *shadow, const struct ob_mpi_call *call, int tensor, int bits,
                   struct ob_record *record) {
  const onebit_dtype_t dtype = shadow_dtype(call);
  const size_t part = shadow_part_size(call->count);
  struct ob_mpi_call exact = *call;
  MPI_Request request;
  int size = 1;
  exact.sendbuf = MPI_IN_PLACE;
  exact.recvbuf = shadow->input;
  exact.count = part;
  PMPI_Comm_size(call->comm, &size);
  if (ob_mpi_call_begin(&exact, &request) != MPI_SUCCESS ||
      ob_wait_for_request(call->comm, &request, "the exact part of a compressed sum") !=
          MPI_SUCCESS ||
      ob_mpi_call_end(&exact, size) != MPI_SUCCESS)
    return;
  ob_record_count_bytes(record, ob_dense_bytes(ONEBIT_ALLREDUCE, dtype, part, size));
  struct difference found =
      shadow_compare(dtype, (const char *)call->recvbuf + shadow->first * ob_elements_size(dtype),
                     (const char *)shadow->input, part);
  double bound = shadow_bound(bits), ratio = found.norm > 0    ? sqrt(found.error / found.norm)
                                             : found.error > 0 ? INFINITY
                                                               : 0;
  int64_t refused = is_refused(shadow, ratio, bound);
  if (ob_allreduce_max(call->comm, &refused, 1) == MPI_SUCCESS && refused)
    shadow->refused = true;
  ob_record_count_shadow(record, tensor, found.error, found.norm, shadow->refused);
  if (shadow->refused)
    shadow_warn(call, tensor, bits, ratio, bound);
}

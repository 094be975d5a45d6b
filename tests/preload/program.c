/*
 * MPI programs that do not use onebit themselves, for tests/scripts/check-preload: `program CASE`.
 * Each checks its sums, which must be correct with and without a preloaded library. "Exact" values
 * have one magnitude and are the same on all ranks, so that one bit and a scale represent them
 * without loss. All programs run with floating-point traps, as `gfortran
 * -ffpe-trap=invalid,zero,overflow` sets them before main.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, feenableexcept */
#include <dlfcn.h>
#include <fenv.h>
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/program.h"

int rank, size;

void fail(const char *what, int step, int i, double is, double wanted) {
  fprintf(stderr, "rank %d: %s: step %d, element %d is %.9g and not %.9g\n", rank, what, step, i,
          is, wanted);
  MPI_Abort(MPI_COMM_WORLD, 3);
}

float exact_value(int step, int i) { return ((i * 7 + step * 3 + i / 5) % 3 ? 0.5F : -0.5F); }

void fill_exact(float *values, int count, int step) {
  for (int i = 0; i < count; i++)
    values[i] = exact_value(step, i);
}

static float tolerance;

void check_sum(const char *what, const float *values, int count, int step, int ranks) {
  for (int i = 0; i < count; i++)
    if (!(fabsf(values[i] - exact_value(step, i) * (float)ranks) <= tolerance))
      fail(what, step, i, values[i], exact_value(step, i) * (float)ranks);
}

void sum_exact(const char *what, float *mine, float *sum, int count, int step, MPI_Comm on) {
  int ranks;
  MPI_Comm_size(on, &ranks);
  fill_exact(mine, count, step);
  MPI_Allreduce(mine, sum, count, MPI_FLOAT, MPI_SUM, on);
  check_sum(what, sum, count, step, ranks);
}

static float *allocate_floats(size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!values)
    MPI_Abort(MPI_COMM_WORLD, 4);
  return values;
}

/* Sums the same buffers in each step: two tensors, one of which is summed in place, and a single
 * number. */
static void sum_steadily(void) {
  static float mine[COUNT], sum[COUNT], other[COUNT + 1];
  for (int step = 0; step < STEPS; step++) {
    int one = 1, all = 0;
    fill_exact(other, COUNT + 1, step + 1);
    sum_exact("steady", mine, sum, COUNT, step, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, other, COUNT + 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    check_sum("in place", other, COUNT + 1, step + 1, size);
    if (all != size)
      fail("small", step, 0, all, size);
  }
}

/* Makes the sums of sum_steadily with more than one bit per element. The product of level and scale
 * is then rounded. */
static void sum_in_several_bits(void) {
  tolerance = 1e-5F;
  sum_steadily();
  tolerance = 0;
}

/* Sums values that one bit does not represent exactly. Each sum contains the error of the previous
 * one, so the total over many steps may differ from the true total only by the last residual. */
static void sum_with_feedback(void) {
  static float mine[COUNT], sum[COUNT], drift[COUNT];
  double left = 0, signal = 0;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++) {
      float base = (float)((i * 37 + 11) % 101 - 50);
      mine[i] = base * (float)(rank + 1) + (float)((i + step * 13 + rank) % 17 - 8);
      float whole = base * (float)(size * (size + 1) / 2);
      for (int r = 0; r < size; r++)
        whole += (float)((i + step * 13 + r) % 17 - 8);
      drift[i] -= whole;
      signal += step == 0 ? (double)whole * whole : 0;
    }
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
      drift[i] += sum[i];
  }
  for (int i = 0; i < COUNT; i++)
    left += (double)drift[i] * drift[i];
  if (!(sqrt(left / signal) <
        8)) /* relative to the sum of one step; without feedback it would be about STEPS */
    fail("feedback", STEPS, 0, sqrt(left / signal), 8);
}

/* Sums two tensors. In the first, rank 0 has outliers, so it needs more than one bit. The second is
 * exact with one bit. */
static void sum_outlier(void) {
  enum { CALLS = 200 };
  static float mine[COUNT], sum[COUNT], drift[COUNT], easy[COUNT + 1];
  tolerance = 1e-5F;
  for (int step = 0; step < CALLS; step++) {
    fill_exact(mine, COUNT, step);
    for (int i = 7; rank == 0 && i < COUNT; i += 2048)
      mine[i] = 1000;
    for (int i = 0; i < COUNT; i++)
      drift[i] -= i % 2048 == 7 ? 1000 + exact_value(step, i) * (float)(size - 1)
                                : exact_value(step, i) * (float)size;
    fill_exact(easy, COUNT + 1, step);
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, easy, COUNT + 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    check_sum("easy", easy, COUNT + 1, step, size);
    for (int i = 0; i < COUNT; i++)
      drift[i] += sum[i];
  }
  for (int i = 0; i < COUNT;
       i++) /* the residual of the outlier reaches some 45,000 with one bit, 30,000 with 2 */
    if (!(fabsf(drift[i]) < (getenv("ONEBIT_BUDGET") ? 100000 : 100)))
      fail("climb", CALLS, i, (double)drift[i], 0);
}

/* Sums integers that one bit does not represent exactly. The result is correct only without
 * compression. */
static void sum_integers(void) {
  static float mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (float)((i * 31 + step) % 1000 + rank);
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++) {
      float whole = (float)((i * 31 + step) % 1000 * size + size * (size - 1) / 2);
      if (sum[i] != whole)
        fail("uncompressed", step, i, sum[i], whole);
    }
  }
}

/* Frees the buffers in each step and allocates new ones at another address. */
static void sum_in_new_buffers(void) {
  void *spacer = NULL;
  for (int step = 0; step < STEPS; step++) {
    float *mine = allocate_floats(COUNT), *sum = allocate_floats(COUNT);
    sum_exact("reuse", mine, sum, COUNT, step, MPI_COMM_WORLD);
    free(spacer);
    spacer = malloc((size_t)((step + rank) % 5 + 1) * 33333);
    free(sum), free(mine);
  }
  free(spacer);
}

/* Changes the buffer in some steps, on one rank only. */
static void sum_in_moved_buffers(void) {
  static float mine[COUNT], sum[COUNT], other[COUNT];
  for (int step = 0; step < STEPS; step++) {
    float *from = rank == size - 1 && step >= 20 && step % 5 == 0 ? other : mine;
    sum_exact("moves", from, sum, COUNT, step, MPI_COMM_WORLD);
  }
}

static void sum_several_counts(void) {
  static float mine[2 * COUNT], sum[2 * COUNT];
  for (int step = 0; step < STEPS; step++)
    sum_exact("counts", mine, sum, step < 25 ? COUNT : COUNT + step * 7, step, MPI_COMM_WORLD);
}

static void sum_on_communicators(void) {
  static float mine[COUNT], sum[COUNT];
  for (int round = 0; round < 4; round++) {
    MPI_Comm comm;
    if (round % 2)
      MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &comm);
    else
      MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    for (int step = 0; step < STEPS / 2; step++)
      sum_exact("communicators", mine, sum, COUNT, step, comm);
    MPI_Comm_free(&comm);
  }
}

static void reduce_largest(void *in, void *inout, int *length, MPI_Datatype *type) {
  const float *a = in;
  float *b = inout;
  (void)type;
  for (int i = 0; i < *length; i++)
    b[i] = a[i] > b[i] ? a[i] : b[i];
}

/* Sums doubles. They are sent as floats unless a value is out of the range of float. */
static void sum_doubles(void) {
  static double mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    double scale = step == 20 ? 1e300 : step == 30 ? 1e-300 : 1;
    for (int i = 0; i < COUNT; i++)
      mine[i] = scale * (double)exact_value(step, i);
    MPI_Allreduce(mine, sum, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
      if (sum[i] != mine[i] * size)
        fail("doubles", step, i, sum[i], mine[i] * size);
    MPI_Allreduce(MPI_IN_PLACE, mine, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (memcmp(mine, sum, COUNT * sizeof *mine) != 0)
      fail("doubles in place", step, 0, mine[0], sum[0]);
  }
}

/* Makes calls that are not sums of floats. Their results are always exact. */
static void make_other_calls(void) {
  static float mine[COUNT], result[COUNT];
  static int wide[2 * COUNT];
  MPI_Datatype pair;
  MPI_Op op;
  MPI_Op_create(reduce_largest, 1, &op);
  MPI_Type_contiguous(2, MPI_FLOAT, &pair);
  MPI_Type_commit(&pair);
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (float)(i + rank + step), wide[i] = i + rank;
    MPI_Allreduce(mine, result, COUNT, MPI_FLOAT, op, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
      if (result[i] != (float)(i + size - 1 + step))
        fail("user's operation", step, i, result[i], i + size - 1 + step);
    MPI_Allreduce(mine, result, COUNT, MPI_FLOAT, MPI_MIN, MPI_COMM_WORLD);
    if (result[5] != (float)(5 + step))
      fail("minimum", step, 5, result[5], 5 + step);
    MPI_Allreduce(wide, wide + COUNT, COUNT, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (wide[COUNT + 7] != 7 * size + size * (size - 1) / 2)
      fail("integers", step, 7, wide[COUNT + 7], 7 * size + size * (size - 1) / 2);
    MPI_Bcast(mine, COUNT / 2, pair, 0, MPI_COMM_WORLD);
  }
  MPI_Type_free(&pair);
  MPI_Op_free(&op);
}

static void sum_not_a_number(void) {
  static float mine[COUNT], sum[COUNT];
  for (int step = 0; step < STEPS; step++) {
    int bad = step == 3 || step == 30;
    fill_exact(mine, COUNT, step);
    if (bad && rank == size - 1)
      mine[77] = NAN;
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (bad && !isnan(sum[77]))
      fail("not a number", step, 77, sum[77], NAN);
    sum[77] = bad ? exact_value(step, 77) * (float)size : sum[77];
    check_sum("beside it", sum, COUNT, step, size);
  }
}

static void gather_and_scatter(void) {
  float *mine = allocate_floats((size_t)size * COUNT), *all = allocate_floats((size_t)size * COUNT);
  for (int step = 0; step < STEPS; step++) {
    fill_exact(mine, size * COUNT, step);
    MPI_Allgather(mine, COUNT, MPI_FLOAT, all, COUNT, MPI_FLOAT, MPI_COMM_WORLD);
    for (int r = 0; r < size; r++)
      check_sum("allgather", all + r * COUNT, COUNT, step, 1);
    MPI_Reduce_scatter_block(mine, all, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
      if (all[i] != exact_value(step, rank * COUNT + i) * (float)size)
        fail("reduce-scatter", step, i, all[i], exact_value(step, rank * COUNT + i) * (float)size);
  }
  free(mine), free(all);
}

/* ---- MPI 4's calls with MPI_Count; a program may use them even if the MPI library lacks them
 * ---- */

typedef int allreduce_c(const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm);
typedef int iallreduce_c(const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm,
                         MPI_Request *);

static void find_function(const char *name, void *call, size_t bytes) {
  void *address = dlsym(RTLD_DEFAULT, name);
  if (!address) {
    fprintf(stderr, "there is no %s\n", name);
    MPI_Abort(MPI_COMM_WORLD, 5);
  }
  memcpy(call, &address, bytes);
}

static void sum_long_counts(void) {
  static float mine[COUNT], sum[COUNT];
  allreduce_c *blocking;
  iallreduce_c *nonblocking_c;
  find_function("MPI_Allreduce_c", &blocking, sizeof blocking);
  find_function("MPI_Iallreduce_c", &nonblocking_c, sizeof nonblocking_c);
  for (int step = 0; step < STEPS; step++) {
    MPI_Request request;
    fill_exact(mine, COUNT, step);
    blocking(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    check_sum("MPI_Allreduce_c", sum, COUNT, step, size);
    nonblocking_c(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    check_sum("MPI_Iallreduce_c", sum, COUNT, step, size);
  }
}

/* Makes calls with a count of 3,000,000,000, on an MPI library that only prints the count, or on
 * one without such calls. */
static void pass_count_beyond_int(void) {
  const MPI_Count count = (MPI_Count)3000000000;
  float nothing = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  allreduce_c *blocking;
  iallreduce_c *nonblocking_c;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  find_function("MPI_Allreduce_c", &blocking, sizeof blocking);
  find_function("MPI_Iallreduce_c", &nonblocking_c, sizeof nonblocking_c);
  int code[2] = {
      blocking(&nothing, &nothing, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
      nonblocking_c(&nothing, &nothing, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request)};
  for (int i = 0; i < 2; i++)
    printf("%s\n", code[i] == MPI_SUCCESS ? "passed" : code[i] == MPI_ERR_COUNT ? "refused" : "?");
}

/* ---- Threads ---- */

static void *run_thread(void *state) {
  MPI_Comm comm = *(MPI_Comm *)state;
  float *mine = allocate_floats(COUNT), *sum = allocate_floats(COUNT);
  for (int step = 0; step < STEPS; step++)
    sum_exact("threads", mine, sum, COUNT, step, comm);
  free(mine), free(sum);
  return NULL;
}

static void sum_in_threads(void) {
  pthread_t thread[2];
  MPI_Comm comm[2];
  for (int t = 0; t < 2; t++)
    MPI_Comm_dup(MPI_COMM_WORLD, &comm[t]);
  for (int t = 0; t < 2; t++)
    pthread_create(&thread[t], NULL, run_thread, &comm[t]);
  for (int t = 0; t < 2; t++)
    pthread_join(thread[t], NULL);
  for (int t = 0; t < 2; t++)
    MPI_Comm_free(&comm[t]);
}

/* Sums gradients in which some blocks are zero, like the gradients of a layer that is not
 * trained. */
static void sum_zeros(void) {
  enum { ZEROS = COUNT + 3 };
  static float values[ZEROS], sums[ZEROS];
  unsigned state = 5 + (unsigned)rank;
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < ZEROS; i++)
      values[i] = i > 5000 && i < 14000 ? 0 : (float)(rand_r(&state) % 2001 - 1000) / 1000.0F;
    MPI_Allreduce(values, sums, ZEROS, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 7500; i < 11500; i++)
      if (sums[i] != 0)
        fail("zeros", step, i, (double)sums[i], 0);
  }
}

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"steady", sum_steadily},
             {"near", sum_in_several_bits},
             {"feedback", sum_with_feedback},
             {"climb", sum_outlier},
             {"uncompressed", sum_integers},
             {"reuse", sum_in_new_buffers},
             {"moves", sum_in_moved_buffers},
             {"counts", sum_several_counts},
             {"communicators", sum_on_communicators},
             {"doubles", sum_doubles},
             {"foreign", make_other_calls},
             {"not-a-number", sum_not_a_number},
             {"gather-and-scatter", gather_and_scatter},
             {"nonblocking", sum_nonblocking},
             {"unfinished", leave_request_unfinished},
             {"progress", check_progress},
             {"mixture", mix_dense_and_compressed},
             {"persistent", sum_persistent},
             {"quiet", sum_small_after_large},
             {"long-counts", sum_long_counts},
             {"beyond-int", pass_count_beyond_int},
             {"zeros", sum_zeros},
             {"attributes", check_attributes},
             {"arguments", check_wrong_arguments},
             {"forked", check_forked_child},
             {"reduce-and-broadcast", reduce_and_broadcast},
             {"threads", sum_in_threads}};

static const int traps = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW;

int main(int argc, char **argv) {
  int level = MPI_THREAD_SINGLE, ran = 0;
  feenableexcept(traps);
  /* "threads CASE..." starts MPI with threads, which most programs do not do */
  if (argc > 1 && !strcmp(argv[1], "threads"))
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  else
    MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int a = 1; a < argc; a++)
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
      if (!strcmp(argv[a], cases[i].name))
        cases[i].run(), ran++;
  MPI_Finalize();
  if (fegetexcept() != traps || fegetround() != FE_TONEAREST)
    return 4;
  if (rank == 0 && ran == argc - 1)
    printf("%d done\n", ran);
  return ran == argc - 1 ? 0 : 2;
}

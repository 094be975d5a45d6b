/* What the options' one line each cannot say: the notes at the end of --help. */
#include <stdio.h>

#include "bench/bench.h"

static void print_ranked_help(void) {
  printf(
      "\nEach iteration begins with a barrier and lasts as long as the slowest rank takes. What "
      "is\n"
      "compared takes turns, iteration by iteration. The dense collective runs on the same "
      "numbers\n"
      "as float32; it is the MPI library's, with the algorithm that the library chooses.\n"
      "algbw and busbw as nccl-tests define them: GB/s of the float32 bytes of the larger buffer,\n"
      "by the median; busbw is algbw * 2(P-1)/P for allreduce, (P-1)/P for the others.\n"
      "Rel. error (-f, -c): of one call with nothing kept from before, in the Euclidean norm.\n"
      "Ranks that outnumber cores want --mca mpi_yield_when_idle 1.\n");
}

static void print_cuda_help(void) {
  printf(
      "\n-d cuda: buffers of a GPU, timed by events; -m's default is %zu. Rows of a collective are "
      "the\n"
      "blocking call, the call on a stream, the same in a graph, and what is dense; -c compares "
      "with\n"
      "the same calls on the host, every bit.\n",
      BENCH_CUDA_BYTES);
}

static void print_blocking_help(void) {
  printf(
      "\n--mpi-algorithms: Open MPI's coll/tuned, all in the same launch; `ompi_info --param coll\n"
      "tuned --level 9` names them. The default is always among them. Some are meant for few "
      "ranks\n"
      "or small sizes and take long elsewhere. Of other MPI libraries only the default is known.\n"
      "--compare: the last column is the median by the best one of the named schedules, leaving\n"
      "out `automatic`: on its line, what the automatic choice costs. A schedule that cannot be\n"
      "planned has a - and the library's words.\n");
}

static void print_nonblocking_help(void) {
  printf("\nThe communication alone (call, then wait), a dummy computation as long as that alone, "
         "and\n"
         "the two together (call, computation with the test calls, wait), by turns. Medians.\n"
         "  Overlap = max(0, 100 * (1 - (Overall - Compute) / Pure Comm.))\n"
         "Time in test calls counts as communication. Without them (-t 0) a message moves on only\n"
         "where the network does so by itself. The dense collective has a computation of its own\n"
         "length, and MPI_Test.\n");
}

void bench_print_notes(const struct bench_benchmark *benchmark) {
  if (benchmark->run_cuda)
    print_cuda_help();
  if (benchmark->kind & BENCH_RANKED)
    print_ranked_help();
  if (benchmark->kind & BENCH_COLLECTIVES)
    print_blocking_help();
  if (benchmark->kind & BENCH_NONBLOCKING)
    print_nonblocking_help();
}

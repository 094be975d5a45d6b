/* Prints how many of this program's MPI calls the preloaded library has compressed. The program is
 * linked to the same shared library: onebit run --gradients -- mpirun -n 2 counters */
#include <mpi.h>
#include <onebit/counters.h>
#include <stdio.h>

int main(int argc, char **argv) {
  static float values[1 << 18];
  int rank;
  onebit_counters_t counters = {.size = sizeof counters};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < 1 << 18; i++) { /* a pseudorandom value from -1 to 1 */
      unsigned n = (unsigned)(i + (step << 18) + (rank << 28)) * 2654435761u;
      values[i] = (float)((n ^ n >> 15) >> 8 & 0xffff) / 32768 - 1;
    }
    MPI_Allreduce(MPI_IN_PLACE, values, 1 << 18, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  onebit_counters_get(&counters);
  if (rank == 0)
    printf("%d of %d calls were compressed, %.1f MB sent instead of %.1f MB\n",
           (int)counters.compressed, (int)counters.calls, (double)counters.bytes_sent / 1e6,
           (double)counters.bytes_dense / 1e6);
  for (size_t i = 0; rank == 0 && i < ONEBIT_COUNTERS_REASONS; i++)
    if (counters.passed[i] > 0)
      printf("  %d not: %s\n", (int)counters.passed[i], onebit_counters_reason(i));
  MPI_Finalize();
  return 0;
}

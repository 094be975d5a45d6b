// Averages numbers over the ranks; each message has one bit a number: mpirun -n 4 allreduce
#include <cstdio>
#include <onebit/mpi.hpp>
#include <vector>

static void average_numbers() {
  const int steps = 1000;
  onebit::communicator comm = onebit::over_mpi(MPI_COMM_WORLD);
  std::vector<float> mine(100000), average(mine.size());
  onebit::plan plan(comm, mine.size()); // keeps the residual for the next call
  double sum = 0;
  for (int step = 0; step < steps; step++, sum += static_cast<double>(average[0])) {
    for (std::size_t i = 0; i < mine.size(); i++)
      mine[i] = static_cast<float>(comm.rank() + 1) * (static_cast<float>(i % 7) - 3);
    plan.allreduce(mine, average);
  }
  if (comm.rank() == 0)
    std::printf("element 0: %.3f over %d calls, the mean of the ranks is %.3f\n", sum / steps,
                steps, -1.5 * (comm.size() + 1));
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int failed = 0;
  try {
    average_numbers();
  } catch (const onebit::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    failed = 1;
  }
  MPI_Finalize();
  return failed;
}

/* Fits a linear model on ranks that communicate over sockets. Each rank has its own points, and the
 * ranks exchange parameter changes every 30 steps: export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
 * MASTER_PORT=29400 RANK=1 outer & RANK=0 outer */
#include <onebit/onebit.h>
#include <stdio.h>

enum { FEATURES = 2000, POINTS = 8, STEPS = 900 };
static float weights[FEATURES];

static float feature(int point, int i) { /* returns a pseudorandom value from -1 to 1 */
  unsigned n = ((unsigned)point * 7919u + (unsigned)i * 104729u) * 2654435761u;
  return (float)((n ^ n >> 15) >> 8 & 0xffff) / 32768 - 1;
}

/* Makes a step of gradient descent on a point of this rank; returns the squared error. */
static double local_step(int point) {
  float missed = 0;
  for (int i = 0; i < FEATURES; i++)
    missed += feature(point, i) * (weights[i] - (float)(i % 11 - 5) / 100);
  for (int i = 0; i < FEATURES; i++)
    weights[i] -= 5e-4f * missed * feature(point, i);
  return (double)missed * (double)missed;
}

int main(void) {
  onebit_comm_t comm = NULL;
  onebit_outer_t outer = NULL;
  onebit_tensor_t tensor = {.parameter = weights, .count = FEATURES};
  double loss = 0;
  onebit_status_t status = onebit_comm_create_sockets(NULL, &comm); /* NULL: options from the
                                                                     * environment */
  if (status == ONEBIT_OK) /* NULL: default options, 30 local steps, a plain mean in one bit */
    status = onebit_outer_create(comm, &tensor, 1, NULL, &outer);
  for (int step = 0; step < STEPS && status == ONEBIT_OK; step++) {
    double square = local_step(onebit_comm_rank(comm) * POINTS + step % POINTS);
    loss = step % POINTS ? loss + square / POINTS : square / POINTS;
    status = onebit_outer_step(outer, 1); /* exchanges at every 30th call */
  }
  if (status == ONEBIT_OK)
    status = onebit_outer_synchronize(outer); /* makes the weights equal on all ranks */
  if (status == ONEBIT_OK)
    printf("rank %d: loss %.6f, the first weight %.6f\n", onebit_comm_rank(comm), loss,
           (double)weights[0]);
  else
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  onebit_outer_destroy(outer);
  onebit_comm_destroy(comm);
  return status != ONEBIT_OK;
}

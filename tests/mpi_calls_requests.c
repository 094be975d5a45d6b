/*
 * Tests the requests of onebit/mpi_calls.h: waits in any order, calls that fall back to dense ones,
 * persistent requests, several threads, and communicators that are freed before their requests.
 */
#include "base/memory.h"
#include "tests/support_mpi.h"

enum { COUNT = 3000, TENSORS = MPI_TENSORS };

static void start_allreduce(struct mpi_tensors *flight, int t, bool poisoned) {
  fill_exact(flight->send[t], ONEBIT_FLOAT32, COUNT, rank_of(flight->comm), t);
  if (poisoned)
    flight->send[t][7] = INFINITY;
  int code = ONEBIT_Iallreduce(flight->send[t], flight->receive[t], COUNT, MPI_FLOAT, MPI_SUM,
                               flight->comm, &flight->request[t]);
  CHECK(code == MPI_SUCCESS && flight->request[t], "code %d: %s", code, onebit_last_error());
}

static void start_finite(struct mpi_tensors *flight, int t) { start_allreduce(flight, t, false); }

static bool is_empty(const MPI_Status *status) {
  int bytes = -1, cancelled = -1;
  MPI_Get_count(status, MPI_BYTE, &bytes);
  MPI_Test_cancelled(status, &cancelled);
  return bytes == 0 && cancelled == 0 && status->MPI_SOURCE == MPI_ANY_SOURCE &&
         status->MPI_TAG == MPI_ANY_TAG;
}

static void finish_request(struct mpi_tensors *flight, int t, bool test) {
  MPI_Status status;
  int done = 0, code = MPI_SUCCESS;
  if (!test)
    code = ONEBIT_Wait(&flight->request[t], &status);
  while (test && code == MPI_SUCCESS && !done)
    code = ONEBIT_Test(&flight->request[t], &done, &status);
  CHECK(code == MPI_SUCCESS && !flight->request[t], "code %d: %s", code, onebit_last_error());
  CHECK(is_empty(&status), "the status is not empty");
  CHECK_EXACT("recvbuf", flight->receive[t], COUNT, size_of(flight->comm), t);
}

static bool is_poisoned(int t, int poisoned) { return poisoned >= 0 && t % 2 == poisoned; }

/* Waits for requests in a different order on each rank, on some ranks by testing. The library first
 * learns the loop of calls and then follows it. In some steps two tensors of rank 0 have a value
 * that is not finite. The sums of these two must not be finite either, and all other sums must be
 * correct. */
static void wait_in_any_order(struct mpi_tensors *flight, int steps) {
  int rank = rank_of(flight->comm);
  for (int step = 0; step < steps; step++) {
    check_case("step %d", step);
    int poisoned = step % 5 == 3 ? step % 2 : -1; /* poisons this tensor and the second one after
                                                   * it; -1: none */
    for (int t = 0; t < TENSORS; t++)
      start_allreduce(flight, t, is_poisoned(t, poisoned) && rank == 0);
    for (int i = 0; i < TENSORS; i++) {
      int t = (rank % 2 ? TENSORS - 1 - i : i + rank) % TENSORS;
      if (is_poisoned(t, poisoned)) {
        ONEBIT_Wait(&flight->request[t], MPI_STATUS_IGNORE);
        CHECK(isinf(flight->receive[t][7]), "%g is finite", (double)flight->receive[t][7]);
        flight->receive[t][7] = exact_result(7, size_of(flight->comm), t, false);
        CHECK_EXACT("recvbuf", flight->receive[t], COUNT, size_of(flight->comm), t);
      } else {
        finish_request(flight, t, (rank + step) % 3 == 0);
      }
    }
  }
}

/* One rank changes the send buffers of two tensors in some steps, so that the ranks withdraw two of
 * the calls in flight. Meanwhile all ranks make blocking calls of the library and of MPI. */
static void check_withdrawn_calls(struct mpi_tensors *flight) {
  int rank = rank_of(flight->comm), size = size_of(flight->comm);
  float *other = allocate(COUNT, sizeof *other);
  float *fresh[2] = {allocate(COUNT, sizeof *other), allocate(COUNT, sizeof *other)};
  for (int step = 0; step < 12; step++) {
    check_case("withdrawing, step %d", step);
    for (int k = 0; k < 2; k++)
      if (rank == size - 1) {
        float *old = flight->send[(step + 2 * k) % TENSORS];
        flight->send[(step + 2 * k) % TENSORS] = fresh[k];
        fresh[k] = old;
      }
    for (int t = 0; t < TENSORS; t++)
      start_finite(flight, t);
    if (step % 2) {
      fill_exact(other, ONEBIT_FLOAT32, COUNT, rank, 0);
      ONEBIT_Allreduce(MPI_IN_PLACE, other, COUNT, MPI_FLOAT, MPI_SUM, flight->comm);
      CHECK_EXACT("in between", other, COUNT, size, 0);
    }
    int one = 1, all = 0;
    if (rank == 0)
      finish_request(flight, step % TENSORS, true);
    if (rank == size - 1)
      finish_request(flight, (step + 1) % TENSORS, false);
    ONEBIT_Waitall(TENSORS, flight->request, MPI_STATUSES_IGNORE);
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, flight->comm);
    CHECK(all == size, "MPI's own sum is %d", all);
    for (int t = 0; t < TENSORS; t++)
      CHECK_EXACT("recvbuf", flight->receive[t], COUNT, size, t);
  }
  free(fresh[0]);
  free(fresh[1]);
  free(other);
}

RankedTest(mpi_calls_requests, are_done_in_any_order) {
  struct mpi_tensors flight = mpi_tensors_make(COUNT);
  wait_in_any_order(&flight, 16);
  check_withdrawn_calls(&flight);
  mpi_tensors_free(&flight);
}

/* Uses two communicators. One rank first waits for the call on the first communicator, another rank
 * for the call on the second. Both calls are withdrawn. */
RankedTest(mpi_calls_requests, on_several_communicators_do_not_wait_for_each_other) {
  struct mpi_tensors flights[2] = {mpi_tensors_make(COUNT), mpi_tensors_make(COUNT)};
  for (int step = 0; step < 12; step++)
    for (int poisoned = 0; poisoned < 2; poisoned++) {
      for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k < 2; k++)
          start_allreduce(&flights[k], t, step % 4 == 3 && rank == 0 && t == poisoned);
      for (int i = 0; i < 2; i++) {
        struct mpi_tensors *flight = &flights[(i + rank) % 2];
        CHECK(ONEBIT_Waitall(TENSORS, flight->request, MPI_STATUSES_IGNORE) == MPI_SUCCESS, "%s",
              onebit_last_error());
      }
    }
  flights[1].comm = MPI_COMM_NULL; /* MPI_Finalize frees it */
  for (int k = 0; k < 2; k++)
    mpi_tensors_free(&flights[k]);
}

/* ---- Persistent requests ---- */

static void check_code(int code, int wanted) {
  CHECK(error_class_of(code) == wanted, "class %d, not %d: %s", error_class_of(code), wanted,
        onebit_last_error());
}

static void check_persistent_requests(struct mpi_tensors *flight) {
  int done = 0;
  MPI_Status statuses[TENSORS];
  for (int t = 0; t < TENSORS; t++) {
    check_code(ONEBIT_Allreduce_init(flight->send[t], flight->receive[t], COUNT, MPI_FLOAT, MPI_SUM,
                                     flight->comm, MPI_INFO_NULL, &flight->request[t]),
               MPI_SUCCESS);
    check_code(ONEBIT_Test(&flight->request[t], &done, MPI_STATUS_IGNORE), MPI_SUCCESS);
    CHECK(done && flight->request[t], "an inactive request is done, and stays");
  }
  for (int step = 0; step < 10; step++) {
    for (int t = 0; t < TENSORS; t++) {
      fill_exact(flight->send[t], ONEBIT_FLOAT32, COUNT, rank_of(flight->comm), t);
      check_code(ONEBIT_Start(&flight->request[t]), MPI_SUCCESS);
      check_code(ONEBIT_Start(&flight->request[t]), MPI_ERR_REQUEST);
      check_code(ONEBIT_Request_free(&flight->request[t]), MPI_ERR_REQUEST);
    }
    check_code(ONEBIT_Waitall(TENSORS, flight->request, statuses), MPI_SUCCESS);
    for (int t = 0; t < TENSORS; t++) {
      CHECK(is_empty(&statuses[t]) && flight->request[t], "status %d", t);
      CHECK_EXACT("recvbuf", flight->receive[t], COUNT, size_of(flight->comm), t);
    }
  }
  check_code(ONEBIT_Request_free(&flight->request[0]), MPI_SUCCESS);
  CHECK(!flight->request[0], "a request that was given back is null");
}

/* Checks that a request in flight completes when its communicator is freed. A persistent request
 * then has no communicator. */
static void check_outlived_communicator(struct mpi_tensors *flight) {
  bool several = size_of(flight->comm) > 1;
  int size = size_of(flight->comm);
  start_finite(flight, 0);
  MPI_Comm_free(&flight->comm);
  check_code(ONEBIT_Wait(&flight->request[0], MPI_STATUS_IGNORE), MPI_SUCCESS);
  CHECK_EXACT("recvbuf", flight->receive[0], COUNT, size, 0);
  if (several)
    check_code(ONEBIT_Start(&flight->request[1]), MPI_ERR_COMM);
  check_code(ONEBIT_Request_free(&flight->request[1]), MPI_SUCCESS);
}

static void check_refused_requests(void) {
  ONEBIT_Request none = ONEBIT_REQUEST_NULL, flying = ONEBIT_REQUEST_NULL;
  MPI_Status status;
  float a[40] = {0}, b[40];
  int done = 0;
  check_code(ONEBIT_Wait(&none, &status), MPI_SUCCESS);
  CHECK(is_empty(&status), "the status of no request is empty");
  check_code(ONEBIT_Test(&none, &done, MPI_STATUS_IGNORE), MPI_SUCCESS);
  CHECK(done, "no request is done");
  check_code(ONEBIT_Waitall(0, NULL, MPI_STATUSES_IGNORE), MPI_SUCCESS);
  check_code(ONEBIT_Start(&none), MPI_ERR_REQUEST);
  check_code(ONEBIT_Request_free(&none), MPI_ERR_REQUEST);
  check_code(ONEBIT_Iallreduce(a, b, 40, MPI_FLOAT, MPI_MIN, MPI_COMM_WORLD, &none), MPI_ERR_OP);
  check_code(ONEBIT_Iallreduce(a, b, 40, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &flying), MPI_SUCCESS);
  check_code(ONEBIT_Start(&flying), MPI_ERR_REQUEST);
  check_code(ONEBIT_Wait(&flying, MPI_STATUS_IGNORE), MPI_SUCCESS);
  check_code(ONEBIT_Iallreduce(NULL, NULL, 0, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &flying),
             MPI_SUCCESS);
  check_code(ONEBIT_Wait(&flying, MPI_STATUS_IGNORE), MPI_SUCCESS);
}

RankedTest(mpi_calls_requests, persist_and_outlive_communicators) {
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  struct mpi_tensors flight = mpi_tensors_make(COUNT);
  check_persistent_requests(&flight);
  check_outlived_communicator(&flight);
  check_refused_requests();
  for (int t = 2; t < TENSORS; t++)
    check_code(ONEBIT_Request_free(&flight.request[t]), MPI_SUCCESS);
  mpi_tensors_free(&flight);
}

/* ---- Memory and threads ---- */

/* Makes the first, the second, ... allocation of a rank fail. No rank may wait for ever, and the
 * sums must be correct. */
RankedTest(mpi_calls_requests, do_without_memory) {
  for (int n = 1; n <= 48; n += n < 12 ? 1 : 3) {
    check_case("allocation %d fails", n);
    struct mpi_tensors flight = mpi_tensors_make(COUNT);
    ob_memory_fail_at(rank == 0 ? n : 0);
    for (int t = 0; t < 2; t++) {
      fill_exact(flight.send[t], ONEBIT_FLOAT32, COUNT, rank, t);
      int code = ONEBIT_Iallreduce(flight.send[t], flight.receive[t], COUNT, MPI_FLOAT, MPI_SUM,
                                   flight.comm, &flight.request[t]);
      CHECK(code == MPI_SUCCESS || (rank == 0 && code == MPI_ERR_NO_MEM), "code %d", code);
    }
    CHECK(ONEBIT_Waitall(2, flight.request, MPI_STATUSES_IGNORE) == MPI_SUCCESS, "%s",
          onebit_last_error());
    ob_memory_fail_at(0);
    for (int t = 0; t < 2; t++)
      CHECK_EXACT("recvbuf", flight.receive[t], COUNT, size_of(flight.comm), t);
    mpi_tensors_free(&flight);
  }
}

static void *make_calls_in_thread(void *argument) {
  struct mpi_tensors *flight = argument;
  check_rank(rank_of(MPI_COMM_WORLD));
  wait_in_any_order(flight, 12);
  check_withdrawn_calls(flight);
  return NULL;
}

/* Waits for requests that another thread has started, while that thread starts more requests. */
static void *wait_in_thread(void *argument) {
  struct mpi_tensors *flight = argument;
  check_rank(rank_of(MPI_COMM_WORLD));
  for (int t = 0; t < TENSORS / 2; t++)
    finish_request(flight, t, t);
  return NULL;
}

static void wait_in_two_threads(struct mpi_tensors *flight) {
  for (int step = 0; step < 8; step++) {
    pthread_t thread;
    for (int t = 0; t < TENSORS / 2; t++)
      start_finite(flight, t);
    pthread_create(&thread, NULL, wait_in_thread, flight);
    for (int t = TENSORS / 2; t < TENSORS; t++)
      start_finite(flight, t);
    for (int t = TENSORS / 2; t < TENSORS; t++)
      finish_request(flight, t, false);
    pthread_join(thread, NULL);
  }
}

RankedTest(mpi_calls_requests, from_several_threads) {
  enum { THREADS = 3 };
  int provided;
  MPI_Query_thread(&provided);
  if (provided == MPI_THREAD_MULTIPLE) {
    struct mpi_tensors flights[THREADS];
    pthread_t threads[THREADS];
    for (int k = 0; k < THREADS; k++)
      flights[k] = mpi_tensors_make(COUNT);
    for (int k = 0; k < THREADS; k++)
      pthread_create(&threads[k], NULL, make_calls_in_thread, &flights[k]);
    for (int k = 0; k < THREADS; k++)
      pthread_join(threads[k], NULL);
    wait_in_two_threads(&flights[0]);
    for (int k = 0; k < THREADS; k++)
      mpi_tensors_free(&flights[k]);
  } else {
    cr_log_warn("this MPI has no MPI_THREAD_MULTIPLE: threads are not tested");
  }
}

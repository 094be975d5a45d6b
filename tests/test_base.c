/* Tests of hashes, JSON and handles, which all modules use. */
#include "base/call_scope.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/memory.h"
#include "tests/support.h"

/* The hash is compared with the published values of 64-bit FNV-1a, because files and messages
 * depend on it. */

Test(hash, published_values) {
  cr_expect_eq(ob_hash(OB_HASH_START, "", 0), UINT64_C(0xcbf29ce484222325));
  cr_expect_eq(ob_hash(OB_HASH_START, "a", 1), UINT64_C(0xaf63dc4c8601ec8c));
  cr_expect_eq(ob_hash(OB_HASH_START, "foobar", 6), UINT64_C(0x85944171f73967e8));
}

Test(hash, goes_on_where_it_ended) {
  cr_expect_eq(ob_hash(ob_hash(OB_HASH_START, "foo", 3), "bar", 3),
               ob_hash(OB_HASH_START, "foobar", 6));
}

/*
 * Tests JSON output: numbers have nine digits, values are separated by commas, and strings are
 * escaped.
 */

Test(json, numbers_keep_nine_digits_or_are_null) {
  char text[OB_JSON_NUMBER];
  cr_expect_str_eq(ob_json_number(text, 0), "0");
  cr_expect_str_eq(ob_json_number(text, -1.25e-300), "-1.25e-300");
  cr_expect_str_eq(ob_json_number(text, 123456789.4), "123456789");
  cr_expect_str_eq(ob_json_number(text, -1.23456789e-308), "-1.23456789e-308");
  cr_expect_str_eq(ob_json_number(text, NAN), "null");
  cr_expect_str_eq(ob_json_number(text, -INFINITY), "null");
}

/* Returns the JSON that a writer produces for some values. */
static const char *write_sample(bool spaced) {
  static char text[512];
  memset(text, 0, sizeof text);
  struct ob_json json = {.file = fmemopen(text, sizeof text - 1, "w"), .spaced = spaced};
  ob_json_begin(&json, NULL, '{');
  ob_json_put_string(&json, "text", "a \"b\" \\ \n\x01");
  ob_json_put_string(&json, "none", NULL);
  ob_json_begin(&json, "list", '[');
  ob_json_real(&json, NULL, 0.5);
  ob_json_begin(&json, NULL, '{');
  ob_json_end(&json, '}');
  ob_json_begin(&json, NULL, '{');
  ob_json_bool(&json, "yes", true);
  ob_json_end(&json, '}');
  ob_json_end(&json, ']');
  ob_json_integer(&json, "largest", UINT64_MAX);
  ob_json_end(&json, '}');
  fclose(json.file);
  cr_expect(spaced || json_is_valid(text), "%s", text);
  return text;
}

Test(json, values_are_divided_and_escaped) {
  cr_expect_str_eq(write_sample(false),
                   "{\"text\":\"a \\\"b\\\" \\\\ \\u000a\\u0001\",\"none\":null,"
                   "\"list\":[0.5,{},{\"yes\":true}],\"largest\":18446744073709551615}");
  cr_expect_str_eq(write_sample(true),
                   "{\"text\": \"a \\\"b\\\" \\\\ \\u000a\\u0001\", \"none\": null, "
                   "\"list\": [0.5,\n  {},\n  {\"yes\": true}], "
                   "\"largest\": 18446744073709551615}");
}

/* Tests the table of handles. Passing the handle of a destroyed object, or of another kind of
 * object, is an error. A communicator exists until the last object that was created on it is
 * destroyed. */

static onebit_plan_t create_plan(onebit_comm_t comm) {
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_OK);
  return plan;
}

/* MANY and STRIDE are primes. Multiples of STRIDE modulo MANY visit the handles in an order other
 * than that of their creation, so that entries are removed from the middle of the table's runs. */
enum { MANY = 1009, STRIDE = 389 };

Test(handles, are_found_until_they_are_retired) {
  void *made[MANY];
  for (size_t i = 0; i < MANY; i++)
    made[i] = ob_handle_create(i % 2 ? OB_HANDLE_PLAN : OB_HANDLE_COMM, 1);
  for (size_t i = 0; i < MANY; i++) {
    size_t k = i * STRIDE % MANY;
    CHECK(ob_handle_is(made[k], k % 2 ? OB_HANDLE_PLAN : OB_HANDLE_COMM), "%zu is not found", k);
    CHECK(!ob_handle_is(made[k], OB_HANDLE_OPTIMIZER), "%zu is found as another kind", k);
    CHECK(!ob_handle_is((char *)made[k] + 1, k % 2 ? OB_HANDLE_PLAN : OB_HANDLE_COMM),
          "the byte after %zu is found", k);
    ob_handle_retire(made[k]);
    CHECK(!ob_handle_is(made[k], k % 2 ? OB_HANDLE_PLAN : OB_HANDLE_COMM), "%zu is still found", k);
    for (size_t j = i + 1; j < MANY; j++) /* the other handles must still be found */
      if (!ob_handle_is(made[j * STRIDE % MANY],
                        j * STRIDE % MANY % 2 ? OB_HANDLE_PLAN : OB_HANDLE_COMM))
        CHECK(false, "%zu took %zu with it", k, j * STRIDE % MANY);
  }
  for (size_t i = 0; i < MANY; i++)
    ob_handle_release(made[i]);
}

/* Makes each of three allocations of onebit_plan_create fail: that of the plan, and two that the
 * handle table makes when it grows. */
Test(handles, failed_growth_fails_the_creation) {
  enum { FILLED = 300 };
  onebit_comm_t comm = self_comm();
  void *made[FILLED];
  for (size_t i = 0; i < FILLED; i++) {
    for (long n = 1; n <= 3; n++) {
      onebit_plan_t plan = NULL;
      ob_memory_fail_at(n + 1); /* onebit_plan_create makes one allocation before these */
      CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_ERROR_MEMORY);
    }
    ob_memory_fail_at(0);
    made[i] = ob_handle_create(OB_HANDLE_OPTIMIZER, 1);
  }
  for (size_t i = 0; i < FILLED; i++) {
    CHECK(ob_handle_is(made[i], OB_HANDLE_OPTIMIZER), "%zu is lost", i);
    ob_handle_release(made[i]);
  }
  onebit_comm_destroy(comm);
}

static void *create_and_retire(void *shared) {
  for (int i = 0; i < 2000; i++) {
    void *own[40];
    for (size_t k = 0; k < 40; k++)
      own[k] = ob_handle_create(OB_HANDLE_PLAN, 1);
    for (size_t k = 0; k < 40; k++) {
      CHECK(ob_handle_is(own[k], OB_HANDLE_PLAN), "a handle of this thread is not found");
      CHECK(ob_handle_is(shared, OB_HANDLE_COMM), "a handle of all threads is not found");
      ob_handle_retire(own[k]);
      CHECK(!ob_handle_is(own[k], OB_HANDLE_PLAN), "a retired handle is found");
      ob_release(own[k]);
    }
  }
  return NULL;
}

Test(handles, in_many_threads) {
  pthread_t threads[8];
  void *shared = ob_handle_create(OB_HANDLE_COMM, 1);
  for (size_t k = 0; k < 8; k++)
    cr_assert_eq(pthread_create(&threads[k], NULL, create_and_retire, shared), 0);
  for (size_t k = 0; k < 8; k++)
    pthread_join(threads[k], NULL);
  ob_handle_release(shared);
}

Test(handles, finished_requests_are_errors_for_62_calls) {
  onebit_comm_t comm = self_comm();
  onebit_plan_t plan = create_plan(comm);
  onebit_request_t request = NULL, old, copy;
  float x = 1, y;
  CHECK_STATUS(onebit_iallreduce(&x, &y, plan, &request), ONEBIT_OK);
  old = copy = request;
  CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  CHECK(request == NULL, "a finished request is not NULL");
  CHECK_STATUS(onebit_wait(&copy), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("*request is 0x");
  CHECK_WORDS("not a request that exists (it is finished, or was never created)");
  for (int call = 1; call <= 62; call++) {
    CHECK_STATUS(onebit_iallreduce(&x, &y, plan, &request), ONEBIT_OK);
    CHECK_STATUS(onebit_test(&copy), ONEBIT_ERROR_ARGUMENT);
    CHECK(copy == old, "a refused request was changed");
    CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  CHECK_STATUS(onebit_wait(&copy), ONEBIT_ERROR_ARGUMENT);
  onebit_comm_destroy(comm);
}

/* Uses a plan and an optimizer after their communicator's handle was destroyed. Rank 1 destroys its
 * handle after the steps, and the other ranks before them. */
static void *use_after_destroy(void *argument) {
  onebit_comm_t comm = argument;
  int rank = onebit_comm_rank(comm);
  onebit_plan_t plan = create_plan(comm), none;
  onebit_optimizer_t optimizer = NULL;
  float p[64] = {0}, g[64], x = (float)rank, mean = 0;
  onebit_tensor_t tensor = {.parameter = p, .gradient = g, .count = 64};
  for (int i = 0; i < 64; i++)
    g[i] = 1;
  CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_OK);
  if (rank != 1)
    onebit_comm_destroy(comm);
  for (int step = 0; step < 3; step++) {
    CHECK_STATUS(onebit_allreduce(&x, &mean, plan), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01F), ONEBIT_OK);
  }
  CHECK(p[0] < 0, "the steps of an optimizer without its communicator's handle did nothing");
  if (rank == 1)
    onebit_comm_destroy(comm);
  CHECK(onebit_comm_rank(comm) == -1, "a destroyed communicator has a rank");
  CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &none), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("comm is 0x");
  CHECK_WORDS("not a communicator that exists (it is destroyed, or was never created)");
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  onebit_optimizer_destroy(optimizer);
  return NULL;
}

Test(handles, plans_and_optimizers_outlive_the_communicators_handle) {
  onebit_comm_t comms[3];
  pthread_t threads[3];
  cr_assert_eq(onebit_comm_create_loopback(3, comms), ONEBIT_OK);
  for (size_t k = 0; k < 3; k++)
    cr_assert_eq(pthread_create(&threads[k], NULL, use_after_destroy, comms[k]), 0);
  for (size_t k = 0; k < 3; k++)
    pthread_join(threads[k], NULL);
}

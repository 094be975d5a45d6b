/* Makes wrong calls on communicators, plans and collectives, and defines the functions that check
 * wrong calls, the list of called functions, and the handles. */
#include "tests/support_wrong_calls.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARGUMENT ONEBIT_ERROR_ARGUMENT
#define BUSY     ONEBIT_ERROR_BUSY

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t made, failed;
static const char *covered[1000];

void wrong_begin(void) { onebit_counters_get(NULL); } /* replaces the last error message */

void wrong_value(const char *function, const char *arguments, bool good, const char *part) {
  bool told = strstr(onebit_last_error(), part) != NULL;
  pthread_mutex_lock(&lock);
  if (made < sizeof covered / sizeof covered[0])
    covered[made] = function;
  made++;
  failed += !good || !told;
  pthread_mutex_unlock(&lock);
  if (!good || !told)
    fprintf(stderr, "%s%s: %s; message \"%s\", which should say \"%s\"\n", function, arguments,
            good ? "the result is right" : "the result is wrong", onebit_last_error(), part);
}

void wrong_end(const char *function, const char *arguments, onebit_status_t got,
               onebit_status_t wanted, const char *part) {
  wrong_value(function, arguments, got == wanted, part);
  if (got != wanted)
    fprintf(stderr, "  it gave %s, not %s\n", onebit_status_string(got),
            onebit_status_string(wanted));
}

size_t wrong_calls_made(void) { return made; }

size_t wrong_calls_failed(void) { return failed; }

bool wrong_calls_cover(const char *function) {
  for (size_t i = 0; i < made && i < sizeof covered / sizeof covered[0]; i++)
    if (strcmp(covered[i], function) == 0)
      return true;
  return false;
}

/* ---- Arguments for the calls ---- */

static bool is_ok(onebit_status_t status) {
  if (status != ONEBIT_OK)
    fprintf(stderr, "the scene: %s\n", onebit_last_error());
  return status == ONEBIT_OK;
}

static bool make_plan(onebit_comm_t comm, onebit_operation_t operation, onebit_plan_t *plan) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = operation;
  return is_ok(onebit_plan_create(comm, WRONG_COUNT, &options, plan));
}

static bool make_optimizer(struct wrong_scene *scene, onebit_optimizer_t *optimizer) {
  scene->tensor =
      (onebit_tensor_t){.parameter = scene->receive, .gradient = scene->send, .count = WRONG_COUNT};
  return is_ok(onebit_efficient_adam_create(scene->comm, &scene->tensor, 1, NULL, optimizer));
}

static bool make_handles(struct wrong_scene *scene) {
  return is_ok(onebit_comm_create_self(&scene->comm)) &&
         is_ok(onebit_comm_create_self(&scene->no_comm)) &&
         make_plan(scene->comm, ONEBIT_ALLREDUCE, &scene->plan) &&
         make_plan(scene->comm, ONEBIT_ALLGATHER, &scene->gathers) &&
         make_plan(scene->comm, ONEBIT_REDUCE_SCATTER, &scene->scatters) &&
         make_plan(scene->comm, ONEBIT_ALLREDUCE, &scene->busy) &&
         make_plan(scene->comm, ONEBIT_ALLREDUCE, &scene->no_plan) &&
         make_optimizer(scene, &scene->optimizer) && make_optimizer(scene, &scene->open) &&
         make_optimizer(scene, &scene->no_optimizer);
}

bool wrong_scene_make(struct wrong_scene *scene) {
  onebit_request_t request;
  *scene = (struct wrong_scene){.foreign = calloc(1, 4096),
                                .send = calloc(WRONG_COUNT, sizeof(float)),
                                .receive = calloc(WRONG_COUNT, sizeof(float))};
  if (!make_handles(scene) || !is_ok(onebit_optimizer_begin(scene->open, 0.1F)) ||
      !is_ok(onebit_iallreduce(scene->send, scene->send, scene->busy, &request)))
    return false;
  scene->no_request = request;
  if (!is_ok(onebit_wait(&request)) ||
      !is_ok(onebit_iallreduce(scene->send, scene->send, scene->busy, &scene->request)))
    return false;
  onebit_optimizer_destroy(scene->no_optimizer);
  onebit_comm_destroy(scene->no_comm);
  return is_ok(onebit_plan_destroy(scene->no_plan));
}

void wrong_scene_end(struct wrong_scene *scene) {
  onebit_wait(&scene->request);
  onebit_optimizer_destroy(scene->optimizer);
  onebit_optimizer_destroy(scene->open);
  onebit_plan_destroy(scene->plan);
  onebit_plan_destroy(scene->gathers);
  onebit_plan_destroy(scene->scatters);
  onebit_plan_destroy(scene->busy);
  onebit_comm_destroy(scene->comm);
  free(scene->foreign);
  free(scene->send);
  free(scene->receive);
}

/* ---- Communicators ---- */

static int fail_send(void *context, const void *data, size_t bytes, int peer, int tag,
                     void **operation) {
  (void)context, (void)data, (void)bytes, (void)peer, (void)tag, (void)operation;
  return -1;
}

static int fail_receive(void *context, void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  (void)context, (void)data, (void)bytes, (void)peer, (void)tag, (void)operation;
  return -1;
}

static int fail_test(void *context, void *operation, double seconds, size_t *bytes) {
  (void)context, (void)operation, (void)seconds, (void)bytes;
  return -1;
}

static void ignore_cancel(void *context, void *operation) { (void)context, (void)operation; }

/* Copies valid options and sets one field to a wrong value. Creating a communicator with them must
 * fail. */
#define UNSOUND(create, sound, field, value, message, ...)                                         \
  do {                                                                                             \
    comm = scene->comm;                                                                            \
    wrong = sound;                                                                                 \
    wrong.field = value;                                                                           \
    WRONG(create, (&wrong, __VA_ARGS__ & comm), ARGUMENT, message);                                \
    WRONG_VALUE(create, (message), comm == NULL, "");                                              \
  } while (0)

static void wrong_callbacks(const struct wrong_scene *scene) {
  const onebit_transport_callbacks_t sound = {.size = sizeof sound,
                                              .send = fail_send,
                                              .receive = fail_receive,
                                              .test = fail_test,
                                              .cancel = ignore_cancel};
  onebit_transport_callbacks_t wrong;
  onebit_comm_t comm;
  WRONG(onebit_comm_create_custom, (NULL, 0, 1, &comm), ARGUMENT, "callbacks is NULL");
  WRONG(onebit_comm_create_custom, (&sound, -1, 1, &comm), ARGUMENT, "rank is -1");
  WRONG(onebit_comm_create_custom, (&sound, 2, 2, &comm), ARGUMENT, "rank is 2, not 0 to size - 1");
  WRONG(onebit_comm_create_custom, (&sound, 0, 0, &comm), ARGUMENT, "size is 0");
  WRONG(onebit_comm_create_custom, (&sound, 0, 1, NULL), ARGUMENT, "comm is NULL");
#define CALLBACKS(field, value, message)                                                           \
  UNSOUND(onebit_comm_create_custom, sound, field, value, message, 0, 1, )
  CALLBACKS(size, 8, "callbacks->size is 8");
  CALLBACKS(send, NULL, "callbacks->send is NULL");
  CALLBACKS(receive, NULL, "callbacks->receive is NULL");
  CALLBACKS(test, NULL, "callbacks->test is NULL");
  CALLBACKS(cancel, NULL, "callbacks->cancel is NULL");
  CALLBACKS(largest_tag, -1, "callbacks->largest_tag is -1");
  CALLBACKS(timeout, -2, "callbacks->timeout is -2");
  CALLBACKS(timeout, (double)NAN, "callbacks->timeout is nan");
}

static void wrong_sockets(const struct wrong_scene *scene) {
  const onebit_sockets_options_t sound = {
      .size = sizeof sound, .ranks = 2, .rendezvous = "127.0.0.1:1"};
  onebit_sockets_options_t wrong;
  onebit_comm_t comm;
  WRONG(onebit_comm_create_sockets, (&sound, NULL), ARGUMENT, "comm is NULL");
#define SOCKETS(field, value, message)                                                             \
  UNSOUND(onebit_comm_create_sockets, sound, field, value, message, )
  SOCKETS(size, 3, "options->size is 3");
  SOCKETS(ranks, -1, "options->ranks is -1");
  SOCKETS(rank, 2, "options->rank is 2, not 0 to ranks - 1, 1");
  SOCKETS(rank, -1, "options->rank is -1");
  SOCKETS(streams, 65, "options->streams is 65, not 1 to 64");
  SOCKETS(streams, -1, "options->streams is -1");
  SOCKETS(timeout, -1, "options->timeout is -1");
  SOCKETS(timeout, (double)NAN, "options->timeout is nan");
  SOCKETS(rendezvous, "127.0.0.1", "expected host:port");
  SOCKETS(rendezvous, "[fe80::1]:29400", "a link-local address needs its interface");
  SOCKETS(rendezvous, "::1:80", "expected host:port");
  SOCKETS(rendezvous, "127.0.0.1:0", "expected host:port");
  SOCKETS(rendezvous, "127.0.0.1:65536", "expected host:port");
  SOCKETS(rendezvous, "no.such.name.invalid:80", "nor the name of a known host");
}

static void wrong_values(const struct wrong_scene *scene) {
  void *foreign = scene->foreign, *plan = scene->plan;
  onebit_comm_t comm;
  WRONG(onebit_comm_shrink, (scene->comm, NULL), ARGUMENT, "survivors is NULL");
#define VALUES(handle, part)                                                                       \
  WRONG_VALUE(onebit_comm_rank, (handle), onebit_comm_rank(handle) == -1, part);                   \
  WRONG_VALUE(onebit_comm_size, (handle), onebit_comm_size(handle) == 0, part);                    \
  WRONG_VALUE(onebit_comm_hosts, (handle), onebit_comm_hosts(handle) == 0, part);                  \
  WRONG_VALUE(onebit_comm_bytes_sent, (handle), onebit_comm_bytes_sent(handle) == 0, part);        \
  WRONG(onebit_progress, (handle), ARGUMENT, part);                                                \
  WRONG(onebit_comm_abort, (handle), ARGUMENT, part);                                              \
  WRONG(onebit_comm_shrink, (handle, &comm), ARGUMENT, part)
  VALUES(NULL, "comm is NULL");
  VALUES(scene->no_comm, "not a communicator that exists (it is destroyed, or was never created)");
  VALUES(plan, "which is a plan");
  VALUES(foreign, "not a communicator that exists (it is destroyed, or was never created)");
  WRONG_VALUE(onebit_status_string, (99),
              strcmp(onebit_status_string((onebit_status_t)99), "unknown status") == 0, "");
  WRONG_VALUE(onebit_counters_reason, (99), onebit_counters_reason(99) == NULL, "");
  WRONG(onebit_counters_get, (NULL), ARGUMENT, "counters is NULL");
  WRONG(onebit_counters_get, (&(onebit_counters_t){.size = 4}), ARGUMENT, "size is 4");
}

void wrong_communicators(const struct wrong_scene *scene) {
  onebit_comm_t comms[2] = {scene->comm};
  void *foreign = scene->foreign, *plan = scene->plan;
  WRONG(onebit_comm_create_self, (NULL), ARGUMENT, "comm is NULL");
  WRONG(onebit_comm_create_loopback, (0, comms), ARGUMENT, "size is 0");
  WRONG(onebit_comm_create_loopback, (4097, comms), ARGUMENT, "size is 4097");
  WRONG(onebit_comm_create_loopback, (2, NULL), ARGUMENT, "comms is NULL");
  WRONG(onebit_comm_create_loopback_hosts, (2, 0, comms), ARGUMENT, "hosts is 0");
  WRONG(onebit_comm_create_loopback_hosts, (2, 3, comms), ARGUMENT, "hosts is 3");
  WRONG_VALUE(onebit_comm_create_loopback_hosts, (untouched), comms[0] == scene->comm, "");
  WRONG(onebit_comm_create_loopback_hosts, (2, 1, NULL), ARGUMENT, "comms is NULL");
#define DESTROY(handle) (onebit_comm_destroy(handle), true)
  WRONG_VALUE(onebit_comm_destroy, (no_comm), DESTROY(scene->no_comm),
              "not a communicator that exists");
  WRONG_VALUE(onebit_comm_destroy, (plan), DESTROY(plan), "comm is 0x");
  WRONG_VALUE(onebit_comm_destroy, (foreign), DESTROY(foreign), "not a communicator that exists");
#undef DESTROY
  wrong_callbacks(scene);
  wrong_sockets(scene);
  wrong_values(scene);
}

/* ---- Plans ---- */

static void wrong_plan_options(const struct wrong_scene *scene) {
  onebit_plan_t plan;
#define PLAN(message, ...)                                                                         \
  plan = scene->no_plan;                                                                           \
  WRONG(onebit_plan_create,                                                                        \
        (scene->comm, 9,                                                                           \
         &(onebit_plan_options_t){.size = sizeof(onebit_plan_options_t), __VA_ARGS__}, &plan),     \
        ARGUMENT, message);                                                                        \
  WRONG_VALUE(onebit_plan_create, (message), plan == NULL, "")
  PLAN("operation is 3", .operation = (onebit_operation_t)3);
  PLAN("operation is -1", .operation = (onebit_operation_t)-1);
  PLAN("dtype is 99", .dtype = (onebit_dtype_t)99);
  PLAN("wire is 2", .wire = (onebit_wire_t)2);
  PLAN("profile is 7", .profile = (onebit_profile_t)7);
  PLAN("scale is 3", .scale = (onebit_scale_t)3);
  PLAN("scale is 2, which messages of 1 bit do", .scale = ONEBIT_SCALE_LARGEST);
  PLAN("scale is 1, which messages of 4 bits do", .bits = 4, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE);
  PLAN("bits is 3", .bits = 3);
  PLAN("bits is -1", .bits = -1);
  PLAN("bits is 8: more than one bit requires", .bits = 8, .wire = ONEBIT_WIRE_DENSE);
  PLAN("bits is 2: more than one bit requires", .bits = 2, .block_size = ONEBIT_BLOCK_BUFFER);
  PLAN("max_bits is 3, not 1, 2, 4 or 8", .max_bits = 3);
  PLAN("max_bits is 2, less than bits, 4", .max_bits = 2, .bits = 4);
  PLAN("max_bits is 8, bits is 4, no_error", .max_bits = 8, .bits = 4, .no_error_feedback = 1);
  PLAN("max_bits is 8: more than one bit requires", .max_bits = 8,
       .block_size = ONEBIT_BLOCK_BUFFER);
  PLAN("messages of 8 bits do not", .max_bits = 8, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE);
  PLAN("block_size is 33", .block_size = 33);
  PLAN("block_size is 65568", .block_size = 65568);
  PLAN("chunk_size is 31", .chunk_size = 31);
  PLAN("chunk_size is 268435488", .chunk_size = ((size_t)1 << 28) + 32);
  PLAN("threads is -1", .threads = -1);
  PLAN("schedule is 4", .schedule = (onebit_schedule_t)4);
  PLAN("device is 7", .device = (onebit_device_t)7);
#define DEEPSPEED .profile = ONEBIT_PROFILE_DEEPSPEED
  PLAN("which fixes scale and block_size", DEEPSPEED, .block_size = 64);
  PLAN("which fixes scale and block_size", DEEPSPEED, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE);
  PLAN("DEEPSPEED, operation is 1", DEEPSPEED, .operation = ONEBIT_ALLGATHER);
  PLAN("DEEPSPEED, operation is 2", DEEPSPEED, .operation = ONEBIT_REDUCE_SCATTER);
#define GATHERS   .schedule = ONEBIT_SCHEDULE_ALLGATHER
#define HIERARCHY .schedule = ONEBIT_SCHEDULE_HIERARCHICAL
  PLAN("schedule", DEEPSPEED, GATHERS);
  PLAN("schedule", DEEPSPEED, HIERARCHY);
  PLAN("schedule", GATHERS, .operation = ONEBIT_REDUCE_SCATTER);
  PLAN("schedule", HIERARCHY, .operation = ONEBIT_REDUCE_SCATTER);
  PLAN("block_size", HIERARCHY, .block_size = ONEBIT_BLOCK_BUFFER);
  PLAN("residual_copies is 3", .residual_copies = 3);
  PLAN("residual_copies is -1", .residual_copies = -1);
  PLAN("residual_copies=1 needs max_bits=1, but max_bits is 4", .residual_copies = 1, .bits = 4);
  WRONG(onebit_plan_create, (scene->comm, 9, &(onebit_plan_options_t){.size = 0}, &plan), ARGUMENT,
        "options->size is 0");
  WRONG(onebit_plan_create, (scene->comm, 9, &(onebit_plan_options_t){.size = 4096}, &plan),
        ARGUMENT, "options->size is 4096");
}

static void wrong_residuals(const struct wrong_scene *scene) {
  float values[WRONG_COUNT] = {0};
  void *comm = scene->comm;
#define RESIDUALS(handle, status, part)                                                            \
  WRONG(onebit_plan_export_residual, (handle, values, NULL), status, part);                        \
  WRONG(onebit_plan_import_residual, (handle, values, NULL), status, part);                        \
  WRONG(onebit_plan_reset_residual, (handle), status, part);                                       \
  WRONG(onebit_plan_reset, (handle), status, part)
  RESIDUALS(NULL, ARGUMENT, "plan is NULL");
  RESIDUALS(scene->no_plan, ARGUMENT,
            "not a plan that exists (it is destroyed, or was never created)");
  RESIDUALS(comm, ARGUMENT, "which is a communicator");
  RESIDUALS(scene->busy, BUSY, "in flight");
  values[3] = NAN;
  WRONG(onebit_plan_import_residual, (scene->plan, values, NULL), ARGUMENT, "worker[3] is nan");
  values[3] = INFINITY;
  WRONG(onebit_plan_import_residual, (scene->plan, NULL, values), ARGUMENT, "server[3] is inf");
}

void wrong_plans(const struct wrong_scene *scene) {
  onebit_plan_t plan;
  onebit_plan_info_t info = {.size = sizeof info};
  void *foreign = scene->foreign, *comm = scene->comm, *optimizer = scene->optimizer;
  WRONG(onebit_plan_create, (NULL, 9, NULL, &plan), ARGUMENT, "comm is NULL");
  WRONG(onebit_plan_create, (scene->no_comm, 9, NULL, &plan), ARGUMENT,
        "not a communicator that exists");
  WRONG(onebit_plan_create, (optimizer, 9, NULL, &plan), ARGUMENT, "which is an optimizer");
  WRONG(onebit_plan_create, (scene->comm, 9, NULL, NULL), ARGUMENT, "plan is NULL");
  WRONG(onebit_plan_create, (scene->comm, SIZE_MAX, NULL, &plan), ARGUMENT, "count is 1844674407");
  WRONG(onebit_plan_create, (scene->comm, SIZE_MAX / 4 + 1, NULL, &plan), ARGUMENT, "count is 46");
  wrong_plan_options(scene);
  WRONG(onebit_plan_destroy, (scene->no_plan), ARGUMENT, "not a plan that exists");
  WRONG(onebit_plan_destroy, (comm), ARGUMENT, "which is a communicator");
  WRONG(onebit_plan_destroy, (foreign), ARGUMENT, "not a plan that exists");
  WRONG(onebit_plan_destroy, (scene->busy), BUSY, "in flight");
  WRONG(onebit_plan_get_info, (NULL, &info), ARGUMENT, "plan is NULL");
  WRONG(onebit_plan_get_info, (scene->no_plan, &info), ARGUMENT, "not a plan that exists");
  WRONG(onebit_plan_get_info, (scene->plan, NULL), ARGUMENT, "info is NULL");
  WRONG(onebit_plan_get_info, (scene->plan, &(onebit_plan_info_t){.size = 1}), ARGUMENT,
        "info->size is 1");
  WRONG(onebit_plan_set_bits, (NULL, 1), ARGUMENT, "plan is NULL");
  WRONG(onebit_plan_set_bits, (scene->no_plan, 1), ARGUMENT, "not a plan that exists");
  WRONG(onebit_plan_set_bits, (scene->busy, 1), BUSY, "in flight");
  WRONG(onebit_plan_set_bits, (scene->plan, 3), ARGUMENT,
        "bits is 3, not a width from the plan's bits, 1, to its max_bits, 1");
  WRONG(onebit_plan_fit_budget, (NULL, 1, 0.5), ARGUMENT, "plans is NULL");
  WRONG(onebit_plan_fit_budget, (&scene->plan, 1, 0), ARGUMENT, "budget is 0: it must be above 0");
  WRONG(onebit_plan_fit_budget, (&scene->plan, 1, 1.5), ARGUMENT, "budget is 1.5: it must");
  WRONG(onebit_plan_fit_budget, (&scene->plan, 1, 0.01), ARGUMENT, "the fewest bits");
  WRONG(onebit_plan_fit_budget, (&scene->busy, 1, 0.5), BUSY, "plans[0] has a request in flight");
  WRONG_VALUE(onebit_plan_explain, (no_plan), !*onebit_plan_explain(scene->no_plan),
              "not a plan that exists");
  WRONG_VALUE(onebit_plan_explain, (comm), !*onebit_plan_explain(comm), "which is a communicator");
  wrong_residuals(scene);
}

/* ---- Collectives ---- */

static void wrong_requests(const struct wrong_scene *scene) {
  onebit_request_t none = NULL, finished = scene->no_request;
  onebit_request_t plan = (onebit_request_t)(void *)scene->plan, foreign = scene->foreign;
#define REQUESTS(argument, part)                                                                   \
  WRONG(onebit_test, (argument), ARGUMENT, part);                                                  \
  WRONG(onebit_wait, (argument), ARGUMENT, part)
  REQUESTS(NULL, "request is NULL");
  REQUESTS(&finished, "not a request that exists (it is finished, or was never created)");
  REQUESTS(&plan, "which is a plan");
  REQUESTS(&foreign, "not a request that exists");
#define STARTS(start)                                                                              \
  WRONG(start, (scene->send, scene->receive, NULL, &none), ARGUMENT, "plan is NULL");              \
  WRONG(start, (scene->send, scene->receive, scene->no_plan, &none), ARGUMENT,                     \
        "not a plan that exists");                                                                 \
  WRONG(start, (scene->send, scene->receive, scene->busy, &none), BUSY, "in flight")
  STARTS(onebit_iallreduce);
  STARTS(onebit_iallgather);
  STARTS(onebit_ireduce_scatter);
  WRONG(onebit_iallreduce, (scene->send, scene->receive, scene->plan, NULL), ARGUMENT,
        "request is NULL");
  if (onebit_iallgather(scene->send, scene->receive, scene->plan, &none) == ONEBIT_OK)
    WRONG(onebit_wait, (&none), ARGUMENT, "plan is for allreduce, not for allgather");
  if (onebit_ireduce_scatter(NULL, scene->receive, scene->scatters, &none) == ONEBIT_OK)
    WRONG(onebit_wait, (&none), ARGUMENT, "sendbuf is NULL");
}

void wrong_collectives(const struct wrong_scene *scene) {
  float *send = scene->send, *receive = scene->receive;
  void *odd = (char *)send + 1, *foreign = scene->foreign, *comm = scene->comm;
#define COLLECTIVE(call, good, other, message)                                                     \
  WRONG(call, (send, receive, NULL), ARGUMENT, "plan is NULL");                                    \
  WRONG(call, (send, receive, scene->no_plan), ARGUMENT, "not a plan that exists");                \
  WRONG(call, (send, receive, comm), ARGUMENT, "which is a communicator");                         \
  WRONG(call, (send, receive, foreign), ARGUMENT, "not a plan that exists");                       \
  WRONG(call, (send, receive, scene->busy), BUSY, "in flight");                                    \
  WRONG(call, (send, receive, other), ARGUMENT, message);                                          \
  WRONG(call, (NULL, receive, good), ARGUMENT, "sendbuf is NULL");                                 \
  WRONG(call, (send, NULL, good), ARGUMENT, "recvbuf is NULL");                                    \
  WRONG(call, (odd, receive, good), ARGUMENT, "not aligned to 4 bytes");                           \
  WRONG(call, (send, (char *)receive + 2, good), ARGUMENT, "not aligned to 4 bytes");              \
  WRONG(call, (send, send + 8, good), ARGUMENT, "overlap")
  COLLECTIVE(onebit_allreduce, scene->plan, scene->gathers, "plan is for allgather");
  COLLECTIVE(onebit_allgather, scene->gathers, scene->plan, "plan is for allreduce");
  COLLECTIVE(onebit_reduce_scatter, scene->scatters, scene->plan, "not for reduce-scatter");
  wrong_requests(scene);
}

/* ---- The functions that the public headers declare ---- */

static char *read_text(const char *path) {
  FILE *file = fopen(path, "r");
  char *text = calloc(1 << 20, 1);
  if (file && text)
    text[fread(text, 1, (1 << 20) - 1, file)] = 0;
  if (file)
    fclose(file);
  return text;
}

/* Replaces comments and preprocessor lines by blanks, so that declarations are left. */
static void keep_declarations(char *text) {
  for (char *at = text; (at = strstr(at, "/*")) != NULL;)
    for (const char *end = strstr(at, "*/") + 2; at < end;)
      *at++ = ' ';
  for (char *line = text; line; line = strchr(line, '\n')) {
    line += *line == '\n';
    for (; *line == '#'; line++)
      for (char *at = line; *at && (*at != '\n' || at[-1] == '\\'); at++)
        *at = ' ';
  }
}

static char *find_next_name(char *text) {
  char *one = strstr(text, "onebit_"), *other = strstr(text, "ONEBIT_");
  return !one || (other && other < one) ? other : one;
}

static bool is_name_character(char c) { return isalnum((unsigned char)c) || c == '_'; }

size_t wrong_check_header(const char *header) {
  char path[100], name[100];
  size_t found = 0;
  snprintf(path, sizeof path, "include/onebit/%s.h", header);
  char *text = read_text(path);
  keep_declarations(text);
  for (char *at = text; (at = find_next_name(at)) != NULL;) {
    size_t length = 0;
    while (is_name_character(at[length]))
      length++;
    if (at[length] == '(' && strncmp(at + length, "(void)", 6) != 0 && !is_name_character(at[-1])) {
      snprintf(name, sizeof name, "%.*s", (int)length, at);
      wrong_value("a wrong call of", name, wrong_calls_cover(name), "");
      found++;
    }
    at += length;
  }
  free(text);
  return found;
}

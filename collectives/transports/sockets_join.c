/* Finds the name of the job, which all its ranks share, and lets ranks 1 and up join rank 0. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/knobs.h"
#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"

/* --- The job of a rank -------------------------------------------------------------------------*/

/* The variables in which launchers set job numbers. `part` distinguishes jobs with the same number,
 * such as the steps of an allocation. `exact`: no two jobs have the same number. If a launcher can
 * be started by another one in the table, it comes first. */
static const struct launcher {
  const char *number, *part;
  bool exact;
} launchers[] = {
    {"TORCHELASTIC_RUN_ID", NULL, true},
    {"PMIX_NAMESPACE", NULL, true},
    {"OMPI_MCA_ess_base_jobid", NULL, true},
    {"PALS_APID", NULL, true},
    {"FLUX_JOB_ID", NULL, true},
    {"SLURM_JOB_ID", "SLURM_STEP_ID", false},
    {"PBS_JOBID", NULL, false},
    {"LSB_JOBID", NULL, false},
};

/* Returns the job number in an environment variable; NULL: it has none. Without an id torchrun sets
 * the variable to "none". */
static const char *read_job_number(const char *name) {
  const char *text = name ? getenv(name) : NULL;
  return text && *text && strcmp(text, "none") != 0 ? text : NULL;
}

static void set_job(struct ob_job *job, const char *named, const char *number, const char *part,
                    bool exact) {
  *job = (struct ob_job){.exact = exact};
  snprintf(job->named, sizeof job->named, "%s", named);
  job->hash[0] = ob_hash(OB_HASH_START, named, strlen(named) + 1);
  job->hash[0] = ob_hash(job->hash[0], number, strlen(number) + 1);
  job->hash[0] = ob_hash(job->hash[0], part, strlen(part));
  job->hash[1] = ob_hash(~job->hash[0], number, strlen(number));
}

void ob_job_find(const char *secret, struct ob_job *job) {
  const char *own = ob_knob_text(OB_KNOB_JOB);
  if (secret || own) {
    set_job(job, secret ? "options->secret" : "ONEBIT_JOB", secret ? secret : own, "", true);
    return;
  }
  for (size_t k = 0; k < sizeof launchers / sizeof launchers[0]; k++) {
    const struct launcher *launcher = &launchers[k];
    const char *number = read_job_number(launcher->number), *part = read_job_number(launcher->part);
    if (!number)
      continue;
    set_job(job, launcher->number, number, part ? part : "", launcher->exact || part);
    return;
  }
  set_job(job, "", "", "", false);
}

void ob_job_make_proof(const struct ob_job *job, const uint64_t nonce[2], uint64_t proof[2]) {
  const uint64_t both[4] = {job->hash[0], job->hash[1], nonce[0], nonce[1]};
  proof[0] = ob_hash(OB_HASH_START, both, sizeof both);
  proof[1] = ob_hash(~proof[0], both, sizeof both);
}

/* --- Joining rank 0 ----------------------------------------------------------------------------*/

/* The time in seconds after which a refusal by another job is final: a job that has ended keeps its
 * port only for a moment, a running job for longer. */
#define OTHER_JOB_SECONDS 5.0

/* Waits a moment for rank 0, which did not answer, or could not be reached, in the latest
 * attempt. */
static onebit_status_t pause_for_root(struct ob_rendezvous *state) {
  char whom[384], at[OB_ADDRESS_BYTES], reason[OB_NET_REASON];
  bool refused = state->refused_since > 0;
  ob_address_print(&state->at, at);
  if (refused)
    snprintf(whom, sizeof whom, "rank 0: %s", state->verdict.text);
  else if (state->absence)
    snprintf(whom, sizeof whom, "rank 0, which does not listen there (%.63s: %s)", at,
             ob_net_reason(state->absence, reason));
  else
    snprintf(whom, sizeof whom, "rank 0 to answer (%.63s)", at);
  onebit_status_t status = ob_rendezvous_pause(state, state->options->rendezvous, whom);
  return status != ONEBIT_OK && refused ? ob_rendezvous_repeat_error(state, &state->verdict)
                                        : status;
}

/* Tries once to connect to rank 0. ONEBIT_IN_PROGRESS: rank 0 is not reachable yet. */
static onebit_status_t connect_root(struct ob_rendezvous *state) {
  state->root = ob_net_socket(state->at.storage.ss_family);
  if (state->root < 0)
    return ob_rendezvous_failed(state, "socket");
  while (ob_net_connect(state->root, &state->at) < 0 && errno != EISCONN) {
    if (!ob_net_is_absence(errno))
      return ob_rendezvous_failed(state, "connect");
    if (errno != EINPROGRESS && errno != EALREADY) {
      state->absence = errno;
      state->refused_since = 0;
      return ONEBIT_IN_PROGRESS;
    }
    OB_TRY(pause_for_root(state));
  }
  state->absence = 0;
  return ONEBIT_OK;
}

/* Listens at the local address of this rank's connection with rank 0. */
static onebit_status_t open_own_listener(struct ob_rendezvous *state, char text[OB_ADDRESS_BYTES]) {
  struct ob_address own, bound;
  char reason[OB_NET_REASON];
  if (ob_net_getsockname(state->root, &own) < 0)
    return ob_rendezvous_failed(state, "getsockname");
  ob_address_set_port(&own, 0);
  own.named = state->at.named;
  state->own = own;
  if (state->listener < 0)
    state->listener = ob_address_listen(&own);
  if (state->listener < 0)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "sockets: this rank cannot listen at a port of its own: %s",
                    ob_net_reason(errno, reason));
  if (ob_net_getsockname(state->listener, &bound) < 0)
    return ob_rendezvous_failed(state, "getsockname");
  ob_address_set_port(&own, ob_address_port(&bound));
  ob_address_print(&own, text);
  return ONEBIT_OK;
}

/* Handles a refusal. A refusal that is marked as temporary may come from a job that has just ended,
 * or from the next communicator of this job. */
static onebit_status_t handle_refusal(struct ob_rendezvous *state, struct ob_answer *answer) {
  answer->text[sizeof answer->text - 1] = '\0';
  if (answer->streams != OB_ANSWER_FOR_NOW)
    return ob_rendezvous_repeat_error(state, answer);
  state->verdict = *answer;
  if (state->refused_since == 0)
    state->refused_since = ob_seconds();
  state->refused_last = ob_seconds();
  if (state->refused_last - state->refused_since > OTHER_JOB_SECONDS &&
      !ob_sockets_is_member(answer->key))
    return ob_rendezvous_repeat_error(state, answer);
  nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
  return ONEBIT_IN_PROGRESS;
}

static onebit_status_t read_answer(struct ob_rendezvous *state, struct ob_answer *answer) {
  OB_TRY(ob_rendezvous_receive(state, state->root, answer, sizeof *answer));
  if (answer->magic != OB_GREETING_MAGIC)
    *answer = (struct ob_answer){.status = ONEBIT_ERROR_TRANSPORT,
                                 .streams = OB_ANSWER_FOR_NOW,
                                 .text = "a program that is not rank 0 listens there"};
  return answer->status < 0 ? handle_refusal(state, answer) : ONEBIT_OK;
}

static onebit_status_t send_proof(struct ob_rendezvous *state, const struct ob_answer *challenge) {
  uint64_t proof[2];
  if (challenge->status != ONEBIT_IN_PROGRESS)
    return ONEBIT_IN_PROGRESS; /* the answer is not rank 0's */
  ob_job_make_proof(&state->job, challenge->key, proof);
  OB_TRY(ob_rendezvous_send(state, state->root, proof, sizeof proof));
  state->joined = true;
  return ONEBIT_OK;
}

/* Replaces loopback addresses in the list by the address at which this rank reaches rank 0. Ranks
 * on rank 0's host have loopback addresses if the host's name resolves to one there. */
static void replace_loopback_addresses(struct ob_rendezvous *state) {
  for (int rank = 1; rank < state->size; rank++) {
    struct ob_address listed, reached = state->at;
    if (!ob_address_scan(state->addresses[rank], &listed) || !ob_address_is_loopback(&listed) ||
        ob_address_is_loopback(&state->own))
      continue;
    ob_address_set_port(&reached, ob_address_port(&listed));
    ob_address_print(&reached, state->addresses[rank]);
  }
  ob_address_print(&state->at, state->addresses[0]);
}

static onebit_status_t read_addresses(struct ob_rendezvous *state) {
  struct ob_answer answer;
  size_t bytes = (size_t)state->size * OB_ADDRESS_BYTES;
  OB_TRY(read_answer(state, &answer));
  if (answer.version != OB_GREETING_VERSION || answer.status != ONEBIT_OK || answer.streams < 1 ||
      answer.streams > ONEBIT_SOCKETS_STREAMS)
    return ob_error(
        ONEBIT_ERROR_TRANSPORT,
        "sockets: rank 0 has another version of the library: install one version on all hosts");
  state->streams = answer.streams;
  memcpy(state->key, answer.key, sizeof state->key);
  OB_TRY(ob_rendezvous_receive(state, state->root, state->addresses, bytes));
  replace_loopback_addresses(state);
  state->watch = (struct ob_watch){.presence = &state->presence};
  return ONEBIT_OK;
}

/* Sends a greeting to rank 0. The greeting has this rank's listening address, unless the rank
 * connects only to report. */
static onebit_status_t greet_root(struct ob_rendezvous *state, bool listens) {
  struct ob_greeting greeting = {.magic = OB_GREETING_MAGIC,
                                 .version = OB_GREETING_VERSION,
                                 .kind = OB_JOIN,
                                 .rank = state->rank,
                                 .size = state->size};
  memcpy(greeting.named, state->job.named, sizeof greeting.named);
  ob_sockets_newest_key(greeting.key);
  if (listens)
    OB_TRY(open_own_listener(state, greeting.address));
  return ob_rendezvous_send(state, state->root, &greeting, sizeof greeting);
}

static onebit_status_t send_greeting_and_proof(struct ob_rendezvous *state, bool listens) {
  struct ob_answer answer;
  onebit_status_t status = greet_root(state, listens);
  if (status == ONEBIT_IN_PROGRESS) /* the rank may have been refused earlier */
    shutdown(state->root, SHUT_WR);
  else
    OB_TRY(status);
  OB_TRY(read_answer(state, &answer));
  return send_proof(state, &answer);
}

static void close_root(struct ob_rendezvous *state) {
  ob_own_close(state->root);
  state->root = -1;
  state->joined = false;
}

/* Tries once to join. ONEBIT_IN_PROGRESS: rank 0 is not reachable yet, or another program listens
 * at the port. */
static onebit_status_t try_join(struct ob_rendezvous *state) {
  onebit_status_t status = connect_root(state);
  if (status == ONEBIT_OK)
    status = send_greeting_and_proof(state, true);
  if (status == ONEBIT_OK)
    status = read_addresses(state);
  if (status == ONEBIT_IN_PROGRESS)
    close_root(state);
  return status;
}

onebit_status_t ob_join(struct ob_rendezvous *state) {
  onebit_status_t status;
  while ((status = try_join(state)) == ONEBIT_IN_PROGRESS)
    OB_TRY(pause_for_root(state));
  state->verdict = (struct ob_answer){0};
  return status;
}

onebit_status_t ob_verdict_read(struct ob_rendezvous *state) {
  size_t left = sizeof state->verdict - state->verdict_done;
  ssize_t got = ob_net_recv(state->root, (char *)&state->verdict + state->verdict_done, left);
  if (got < 0 && (errno == EAGAIN || errno == EINTR))
    return ONEBIT_IN_PROGRESS;
  if (got < 0 && !ob_net_is_absence(errno))
    return ob_rendezvous_failed(state, "recv");
  if (got <= 0)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "sockets: rank 0 ended before all ranks were connected");
  state->verdict_done += (size_t)got;
  if (state->verdict_done < sizeof state->verdict)
    return ONEBIT_IN_PROGRESS;
  return state->verdict.status == ONEBIT_OK ? ONEBIT_OK
                                            : ob_rendezvous_repeat_error(state, &state->verdict);
}

/* Reports an error to rank 0. If this rank has not joined yet, it joins first, for which it may
 * have to wait until rank 0 starts. A failure to send the report is ignored. */
void ob_join_report(struct ob_rendezvous *state, const struct ob_answer *report) {
  double until = ob_seconds() + ob_join_last;
  state->timeout = ob_join_last;
  state->watch = (struct ob_watch){.presence = &state->presence};
  while (!state->joined && !state->told && ob_seconds() < until) {
    close_root(state);
    if (connect_root(state) == ONEBIT_OK)
      (void)send_greeting_and_proof(state, false);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  if (state->joined)
    (void)!ob_send_all(state->root, report, sizeof *report);
}

/* Joins as a second rank 0. In a job without an exact name this makes the communicator of the first
 * one fail. */
void ob_join_as_second_root(struct ob_rendezvous *state) {
  struct ob_answer answer;
  double timeout = state->timeout;
  state->timeout = timeout < ob_join_last ? timeout : ob_join_last;
  if (connect_root(state) == ONEBIT_OK && send_greeting_and_proof(state, false) == ONEBIT_OK)
    (void)read_answer(state, &answer);
  close_root(state);
  state->timeout = timeout;
}

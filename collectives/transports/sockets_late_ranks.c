/*
 * Keeps rank 0's port after all have joined. A job without an exact name (sockets_job.c) cannot
 * tell its ranks from those of another job at the same port. Late ranks of the other job could join
 * each other at a port that was given up; so the port is kept, and late ranks are refused.
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/log.h"
#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"

/* Warns of a late rank: another job's rank may have taken its place. */
static void sockets_late_warn(struct ob_sockets *sockets) {
  if (!sockets->warned)
    ob_log(
        OB_LOG_WARN, sockets->rank,
        "sockets: a rank has come to this job's port when all %d had joined: if another job uses "
        "the port, too, its ranks may be in this one (ONEBIT_JOB names a job)",
        sockets->size);
  sockets->warned = true;
}

/* Reads the greeting first: closing a connection with unread bytes discards the answer. */
static void refuse_one(struct ob_sockets *sockets, int file) {
  struct ob_answer answer = {.magic = OB_GREETING_MAGIC,
                             .version = OB_GREETING_VERSION,
                             .status = ONEBIT_ERROR_TRANSPORT,
                             .streams = OB_ANSWER_FOR_NOW,
                             .key = {sockets->key[0], sockets->key[1]}};
  struct ob_greeting greeting = {0};
  snprintf(answer.text, sizeof answer.text,
           "all %d ranks of the job at this port are connected already: another job uses it, or "
           "this rank was started again. Give each job another port, or a name of its own "
           "(ONEBIT_JOB)",
           sockets->size);
  (void)!ob_net_recv(file, &greeting, sizeof greeting);
  (void)!ob_send_all(file, &answer, sizeof answer);
  ob_own_close(file);
  if (greeting.magic == OB_GREETING_MAGIC &&
      memcmp(greeting.key, sockets->key, sizeof sockets->key) != 0) /* for the next one */
    sockets_late_warn(sockets);
}

void ob_sockets_refuse(struct ob_sockets *sockets) {
  int file;
  while ((file = ob_net_accept(sockets->listener)) >= 0)
    refuse_one(sockets, file);
}

void ob_sockets_keep_listener(struct ob_sockets *sockets, int listener) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = sockets};
  if (ob_net_epoll_add(sockets->events, listener, &event) == 0)
    sockets->listener = listener;
  else
    ob_own_close(listener);
}

/*
 * The port of rank 0 when all have joined. A job that has no exact name (sockets_job.c) cannot tell
 * its ranks from those of another job at the same port. If the port were given up, ranks of the
 * other job that come late could be joined there by each other; so it is kept, and who comes is
 * refused.
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/forked.h"
#include "collectives/transports/sockets_rendezvous.h"

/* Not before it has been read: what is not read makes a closed connection throw away the answer. */
static void refuse_one(const struct ob_sockets *sockets, int file) {
  struct ob_answer answer = {.magic = OB_GREETING_MAGIC,
                             .version = OB_GREETING_VERSION,
                             .status = ONEBIT_ERROR_TRANSPORT,
                             .streams = OB_ANSWER_FOR_NOW,
                             .key = {sockets->key[0], sockets->key[1]}};
  char unread[sizeof(struct ob_greeting)];
  snprintf(answer.text, sizeof answer.text,
           "all %d ranks of the job at this port are connected already: another job uses it, or "
           "this rank was started again. Give each job another port, or a name of its own "
           "(ONEBIT_JOB)",
           sockets->size);
  (void)!ob_net_recv(file, unread, sizeof unread);
  (void)!ob_send_all(file, &answer, sizeof answer);
  ob_own_close(file);
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

/*
 * Publishes the waits of this host's ranks, for `onebit status`: each communicator over a network
 * has a file in /tmp/onebit-UID, which its process has locked for as long as it lives. A wait of a
 * second and more is written there, once a second.
 */
#ifndef OB_COLLECTIVES_PRESENCE_H
#define OB_COLLECTIVES_PRESENCE_H

/* One a communicator; all zero: none, where no file can be made. */
struct ob_presence {
  int file;        /* 0: none */
  unsigned number; /* of the file, in this process */
  int rank, size;
  const char *over; /* the transport's name */
  double written;   /* by ob_seconds */
};

void ob_presence_begin(struct ob_presence *presence, int rank, int size, const char *over);
void ob_presence_end(struct ob_presence *presence);

/* True if it is time to write the wait. `waited`, `now`: seconds. */
int ob_presence_is_due(const struct ob_presence *presence, double waited, double now);
void ob_presence_write(struct ob_presence *presence, double now, const char *text);

#endif

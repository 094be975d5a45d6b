/*
 * Files that belong to this process alone. A process that is forked from it has them open too: as
 * long as the child runs, the system closes no connection of a parent that was killed, and gives up
 * no lock of it. So a child closes at once what is registered here, and what it has copied of
 * objects of the parent is no use to it.
 */
#ifndef OB_BASE_FORKED_H
#define OB_BASE_FORKED_H

/* Registers an open file, and returns it; a negative number is only returned. */
int ob_own_file(int file);

/* Closes a registered file. A negative number is fine. */
void ob_own_close(int file);

/* The number of forks from the loading of the library to this process. An object that was made at
 * another number belongs to a parent process. */
unsigned ob_forks(void);

#endif

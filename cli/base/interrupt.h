/* interrupt.h: SIGINT and SIGTERM as a wish to stop soon. The second one ends the program as ever. */
#ifndef FOLIO_INTERRUPT_H
#define FOLIO_INTERRUPT_H

void interrupt_catch(void);
/* The signal that came; 0: none. */
int interrupt_signal(void);

#endif

//! The terminal. It is put back as it was however this ends: by `q`, an error, a signal, or a panic (`ratatui::init`
//! sets a hook for that).

use super::{EVERY, sample::Sample, view::View};
use crate::admin::Target;
use anyhow::Context;
use bowline_api::State;
use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, KeyCode, KeyEventKind, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Gauge, Paragraph},
};
use std::{
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    time::Duration,
};
use tokio::signal::unix::{SignalKind, signal};

/// How long keys are waited for before the samples are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Columns of figures.
const COLUMN_WIDTH: u16 = 40;

enum Event {
    Sample(Box<Sample>),
    /// Why the server gave none.
    Silent(String),
    /// A signal asks to end.
    End,
}

pub fn run(target: Target, first: Sample) -> anyhow::Result<()> {
    let (sender, events) = sync_channel(16);
    end_on_signals(sender.clone())?;
    std::thread::Builder::new().name("samples".into()).spawn(move || {
        loop {
            std::thread::sleep(EVERY);
            let event = match Sample::take(&target) {
                Ok(sample) => Event::Sample(Box::new(sample)),
                Err(error) => Event::Silent(format!("{error:#}")),
            };
            if sender.send(event).is_err() {
                return;
            }
        }
    })?;
    let mut terminal = ratatui::try_init().context("the terminal cannot be drawn on")?;
    let result = watch(&mut terminal, &events, first);
    ratatui::restore();
    result
}

/// SIGTERM and SIGHUP; Ctrl-C is a key while the terminal is raw.
fn end_on_signals(events: SyncSender<Event>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut terminate, mut hang_up) = {
        let _guard = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?)
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
        });
        // Whoever has ended already needs no telling.
        let _ = events.send(Event::End);
    })?;
    Ok(())
}

fn watch(terminal: &mut DefaultTerminal, events: &Receiver<Event>, first: Sample) -> anyhow::Result<()> {
    let (mut before, mut now, mut silent) = (None, first, None);
    loop {
        let view = View::of(before.as_ref(), &now);
        terminal.draw(|frame| draw(frame, &view, silent.as_deref()))?;
        if event::poll(LOOK_EVERY)? && is_quit(&event::read()?) {
            return Ok(());
        }
        loop {
            match events.try_recv() {
                Ok(Event::Sample(sample)) => {
                    (before, silent) = (Some(std::mem::replace(&mut now, *sample)), None);
                }
                Ok(Event::Silent(why)) => silent = Some(why),
                Ok(Event::End) => return Ok(()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => anyhow::bail!("nobody asks the server any more"),
            }
        }
    }
}

fn is_quit(event: &event::Event) -> bool {
    let event::Event::Key(key) = event else { return false };
    let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (key.code == KeyCode::Char('q') || is_interrupt)
}

fn draw(frame: &mut Frame<'_>, view: &View, silent: Option<&str>) {
    let drain_rows = u16::from(view.drain.is_some());
    let [title, drain, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(drain_rows),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let colour = match view.state {
        State::Ready => Color::Green,
        State::Starting | State::Draining => Color::Yellow,
    };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(view.title.as_str()).style(bold.fg(colour)), title);
    if let Some(one) = &view.drain {
        let most = view.sections.first().and_then(|section| section.lines.first()).map_or(0.0, |l| l.value);
        let left = if most > 0.0 { (one.remaining as f64 / most).clamp(0.0, 1.0) } else { 0.0 };
        let gauge = Gauge::default().ratio(1.0 - left).label(one.text());
        frame.render_widget(gauge.gauge_style(Style::new().fg(Color::Yellow)), drain);
    }
    draw_sections(frame, view, body);
    let foot_line = match silent {
        Some(why) => Line::styled(why, Style::new().fg(Color::Red)),
        None => Line::styled("q quits", Style::new().add_modifier(Modifier::DIM)),
    };
    frame.render_widget(Paragraph::new(foot_line), foot);
}

/// As many columns as fit, filled from above.
fn draw_sections(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let columns = (area.width / COLUMN_WIDTH).max(1);
    let width = area.width / columns;
    let (mut column, mut row) = (0, 0);
    for section in view.sections.iter().filter(|section| !section.lines.is_empty()) {
        let height = section.lines.len() as u16 + 2;
        if row > 0 && row + height > area.height {
            (column, row) = (column + 1, 0);
        }
        if column == columns {
            return;
        }
        let place = Rect {
            x: area.x + column * width,
            y: area.y + row,
            width,
            height: height.min(area.height.saturating_sub(row)),
        };
        let inner = usize::from(width.saturating_sub(2));
        let lines: Vec<Line<'_>> = section
            .lines
            .iter()
            .map(|line| {
                let shown = line.shown();
                let room = inner.saturating_sub(shown.chars().count() + 1);
                let name: String = line.name.chars().take(room).collect();
                let value = Span::styled(shown, Style::new().add_modifier(Modifier::BOLD));
                Line::from(vec![Span::raw(format!("{name:<room$} ")), value])
            })
            .collect();
        let block = Block::bordered().title(section.name);
        frame.render_widget(Paragraph::new(lines).block(block), place);
        row += height;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::tests::sample;
    use ratatui::{Terminal, backend::TestBackend};
    use std::time::Instant;

    fn drawn(width: u16, height: u16, silent: Option<&str>) -> String {
        let text = "bowline_gateway_frames_in_total 10\nbowline_ledger_waiting 4711\n\
                    process_resident_memory_bytes 1000000\nprocess_cpu_seconds_total 1\n";
        let view = View::of(None, &sample(Instant::now(), "a", text));
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &view, silent)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn everything_is_on_a_screen_of_usual_size() {
        let screen = drawn(120, 40, None);
        for part in
            ["n1", "draining", "connections", "frames in", "4711", "1.0 MB", "q quits", "12 connections left"]
        {
            assert!(screen.contains(part), "{part} is missing in\n{screen}");
        }
        assert!(drawn(80, 24, Some("nobody answers")).contains("nobody answers"));
    }

    #[test]
    fn no_screen_is_too_small() {
        for (width, height) in [(1, 1), (10, 3), (39, 5), (200, 2)] {
            drawn(width, height, None);
        }
    }
}

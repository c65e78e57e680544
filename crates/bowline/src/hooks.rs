//! What the application is asked: whether a user may join a room.

use crate::{cli::Failure, config::Config, data::DataDir, now_ms, random_text};
use anyhow::Context;
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use bowline_gateway::{RoomJoin, RoomJudge, RoomQuestion, RoomReply};
use bowline_hooks::{Asker, Secret};
use serde_json::json;
use std::sync::Arc;

#[derive(serde::Deserialize)]
struct Verdict {
    allow: bool,
}

/// Who judges joins, with `rooms.join = "hook"`.
pub fn room_judge(config: &Config, data: &DataDir) -> Result<Option<RoomJudge>, Failure> {
    let Some(url) =
        config.hooks.room_join_url.as_ref().filter(|_| config.gateway.room_join == RoomJoin::Hook)
    else {
        return Ok(None);
    };
    let asker = Asker::new(url, secret(config, data)?)
        .context("hooks.room_join_url cannot be used")
        .map_err(Failure::Usage)?;
    let asker = Arc::new(asker);
    let runtime = tokio::runtime::Handle::current();
    tracing::info!("the application judges who may join a room, at {url} (hooks.room_join_url)");
    Ok(Some(Arc::new(move |question: RoomQuestion, reply: RoomReply| {
        let asker = asker.clone();
        runtime.spawn(async move {
            let verdict = ask(&asker, &question).await;
            if let Err(cause) = &verdict {
                tracing::debug!(user = %question.user, room = %question.room, cause, "a join was not judged");
            }
            reply(verdict);
        });
    })))
}

async fn ask(asker: &Asker, question: &RoomQuestion) -> Result<bool, String> {
    let RoomQuestion { user, device, room } = question;
    let id = format!("msg_{}", random_text().map_err(|error| error.to_string())?);
    let question = json!({ "user_id": user, "device_id": device, "room": room });
    let verdict = asker.ask::<Verdict>(&id, now_ms() / 1000, &question).await;
    verdict.map(|verdict| verdict.allow).map_err(|error| error.to_string())
}

/// `hooks.secret`, or the one of the data directory.
fn secret(config: &Config, data: &DataDir) -> Result<Secret, Failure> {
    let text = match &config.hooks.secret {
        Some(text) => text.clone(),
        None => {
            let bytes = URL_SAFE_NO_PAD.decode(data.secret(DataDir::HOOK_SECRET)?);
            let bytes = bytes
                .with_context(|| format!("the generated {} is damaged; delete it", DataDir::HOOK_SECRET))
                .map_err(Failure::Failed)?;
            let text = format!("whsec_{}", STANDARD.encode(bytes));
            tracing::info!("no hooks.secret is configured: this data directory's is {text}");
            text
        }
    };
    Secret::parse(&text).context("hooks.secret cannot be used").map_err(Failure::Usage)
}
